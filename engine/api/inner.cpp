#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/parts.hpp"
#include "api/tree.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/memory_use.hpp"

namespace afflux {
namespace {

using Sums = std::vector<double>;

constexpr const char* kOp = "inner";

void vector(const check::Name& name, const View<const void>& view, std::int64_t size, check::Overlaps& overlaps) {
  check::type(kOp, name, view.type, {Type::float32, Type::float64, Type::bfloat16});
  check::read(kOp, name, view, size, overlaps, check::PartTypes::any);
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
  const bool given = inner.memory.data != nullptr || inner.memory.parts != nullptr || inner.memory.size > 0;
  // The memory of an empty vector may be null on a GPU.
  const bool empty = count > 0 && inner.vectors.data[0].size == 0;
  if (!given && !empty && (inner.shift != 0.0 || inner.memory_weight != 0.0))
    check::fail(kOp, "memory is missing, and shift or memory_weight is not 0");
  check::host(kOp, "out", out);
  check::view(kOp, "out", out, with_sum ? 2 * count + 1 : count);
  overlaps.write_numbers("out", out);
  const std::int64_t size = count > 0 ? inner.vectors.data[0].size : inner.memory.size;
  for (std::int64_t k = 0; k < count; ++k) vector(check::Name("vectors", k), inner.vectors.data[k], size, overlaps);
  if (given) vector("memory", inner.memory, size, overlaps);
  overlaps.refuse(kOp);
}

// The arguments with vectors in parts: the views of one thread.
class MovedInner {
 public:
  MovedInner(const Inner& inner, const Cut& cut)
      : views_(cut), vectors_(inner.vectors.data, inner.vectors.data + inner.vectors.size), inner_(inner) {
    for (View<const void>& view : vectors_) views_.add(view);
    views_.add(inner_.memory, inner.shift != 0.0 || inner.memory_weight != 0.0);
    inner_.vectors.data = vectors_.data();
  }
  const Inner& at(const Chunk& chunk) {
    views_.enter(chunk);
    return inner_;
  }

 private:
  MovedViews views_;
  std::vector<View<const void>> vectors_;
  Inner inner_;
};

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
    const int threads = threads_worth(overlaps.traffic(), num_threads);
    std::optional<Cut> cut;
    std::optional<PerThread<MovedInner>> moved;
    if (overlaps.parts() != nullptr) {
      cut.emplace(*overlaps.parts(), true);
      for (std::int64_t k = 0; k < count; ++k) cut->add(inner.vectors.data[k]);
      cut->add(inner.memory);
      moved.emplace(threads, [&] { return std::make_unique<MovedInner>(inner, *cut); });
    }
    const auto leaf = [&](std::int64_t superblock, Sums& node) {
      const std::int64_t begin = superblock * kSuperblock, end = std::min(begin + kSuperblock, d);
      Sums work(static_cast<std::size_t>(inner_work(count)));
      std::fill(node.begin(), node.end(), 0.0);
      if (!cut) return kernel(inner, memory, begin, end, work.data(), node.data());
      moved->with([&](MovedInner& here) {
        cut->each_chunk(begin, end, kSuperblock, [&](const Chunk& chunk) {
          kernel(here.at(chunk), memory, chunk.begin, chunk.end, work.data(), node.data());
        });
      });
    };
    const auto join = [](Sums& left, const Sums& right) {
      for (std::size_t i = 0; i < left.size(); ++i) left[i] = left[i] + right[i];
    };
    sums = tree(d, threads, sums, leaf, join);
  }
  std::copy(sums.begin(), sums.end(), out.data);
}

}  // namespace afflux
