#include <algorithm>
#include <vector>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/overlap.hpp"
#include "api/tree.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/memory_use.hpp"

namespace afflux {
namespace {

using Sums = std::vector<double>;

constexpr const char* kOp = "inner";

void vector(const check::Name& name, const View<const void>& view, std::int64_t size, check::Overlaps& overlaps) {
  check::type(kOp, name, view.type, {Type::float32, Type::float64, Type::bfloat16});
  check::view(kOp, name, view, size);
  overlaps.read(name, view);
}

// Checks all arguments, and fills `overlaps` with the memory that is read and written.
void check_all(const Inner& inner, const View<double>& out, int num_threads, check::Overlaps& overlaps) {
  const std::int64_t count = inner.vectors.size;
  check::threads(kOp, num_threads);
  check::list(kOp, "vectors", inner.vectors);
  check::list(kOp, "weights", inner.weights);
  const bool with_sum = inner.weights.data != nullptr;
  if (with_sum && inner.weights.size != count)
    check::fail(kOp, "weights has " + std::to_string(inner.weights.size) + " entries, expected " +
                         std::to_string(count) + ", one for each vector");
  for (std::int64_t k = 0; k < inner.weights.size; ++k)
    check::finite(kOp, check::Name("weights", k), inner.weights.data[k]);
  check::finite(kOp, "shift", inner.shift);
  check::finite(kOp, "memory_weight", inner.memory_weight);
  if (inner.memory_weight != 0.0 && !with_sum) check::fail(kOp, "memory_weight asks for a sum, which takes weights");
  if (inner.memory_weight != 0.0 && count == 0) check::fail(kOp, "memory_weight asks for a sum, and vectors is empty");
  const bool given = inner.memory.data != nullptr || inner.memory.size > 0;
  if (!given && (inner.shift != 0.0 || inner.memory_weight != 0.0))
    check::fail(kOp, "memory is missing, and shift or memory_weight is not 0");
  check::host(kOp, "out", out);
  check::view(kOp, "out", out, with_sum ? 2 * count + 1 : count);
  overlaps.write_numbers("out", out);
  const std::int64_t size = count > 0 ? inner.vectors.data[0].size : inner.memory.size;
  for (std::int64_t k = 0; k < count; ++k) vector(check::Name("vectors", k), inner.vectors.data[k], size, overlaps);
  if (given) vector("memory", inner.memory, size, overlaps);
  overlaps.refuse(kOp);
}

}  // namespace

void inner(const Inner& inner, View<double> out, int num_threads) {
  check::Overlaps overlaps;
  check_all(inner, out, num_threads, overlaps);
  const std::int64_t count = inner.vectors.size, d = count > 0 ? inner.vectors.data[0].size : 0;
  Sums sums(static_cast<std::size_t>(out.size), 0.0);
  if (d > 0 && overlaps.device().kind == DeviceKind::cuda) {
    cuda::backend()->inner(cuda::on(overlaps.device()), inner, sums.data());
  } else {
    const auto kernel = kernels().inner;
    const MemoryUse memory = memory_use(overlaps.traffic());
    const auto leaf = [&](std::int64_t superblock, Sums& node) {
      const std::int64_t begin = superblock * kSuperblock;
      Sums work(static_cast<std::size_t>(inner_work(count)));
      kernel(inner, memory, begin, std::min(begin + kSuperblock, d), work.data(), node.data());
    };
    const auto join = [](Sums& left, const Sums& right) {
      for (std::size_t i = 0; i < left.size(); ++i) left[i] = left[i] + right[i];
    };
    sums = tree(d, threads_worth(overlaps.traffic(), num_threads), sums, leaf, join);
  }
  std::copy(sums.begin(), sums.end(), out.data);
}

}  // namespace afflux
