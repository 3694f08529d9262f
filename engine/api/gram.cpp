#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/parts.hpp"
#include "api/tree.hpp"
#include "cpu/dispatch.hpp"

namespace afflux {
namespace {

constexpr std::int64_t kPanel = 64;

using Sums = std::vector<double>;

// Panels of vectors of which some are in parts: the views of one thread.
class MovedPanels {
 public:
  MovedPanels(const GramPanels& panels, const Cut& cut)
      : views_(cut),
        left_(panels.left, panels.left + panels.left_count),
        right_(panels.right, panels.right + (panels.left == panels.right ? 0 : panels.right_count)),
        panels_{left_.data(), right_.empty() ? left_.data() : right_.data(), panels.left_count, panels.right_count} {
    for (auto* const side : {&left_, &right_})
      for (View<const void>& view : *side) views_.add(view);
  }
  const GramPanels& at(const Chunk& chunk) {
    views_.enter(chunk);
    left_.front().size = chunk.end;  // up to which the kernel prefetches
    return panels_;
  }

 private:
  MovedViews views_;
  std::vector<View<const void>> left_, right_;
  const GramPanels panels_;
};

Sums panel_products(const GramPanels& panels, std::int64_t d, const check::Overlaps& overlaps, int num_threads) {
  const Device device = overlaps.device();
  const auto kernel = kernels().gram;
  std::optional<Cut> cut;
  std::optional<PerThread<MovedPanels>> threads;
  if (overlaps.parts() != nullptr) {
    cut.emplace(*overlaps.parts(), true);
    for (std::int64_t i = 0; i < panels.left_count; ++i) cut->add(panels.left[i]);
    for (std::int64_t i = 0; i < panels.right_count && panels.right != panels.left; ++i) cut->add(panels.right[i]);
    threads.emplace(num_threads, [&] { return std::make_unique<MovedPanels>(panels, *cut); });
  }
  const auto leaf = [&](std::int64_t superblock, Sums& out) {
    const std::int64_t begin = superblock * kSuperblock, end = std::min(begin + kSuperblock, d);
    std::fill(out.begin(), out.end(), 0.0);
    if (!cut) return kernel(panels, begin, end, out.data());
    threads->with([&](MovedPanels& moved) {
      cut->each_chunk(begin, end, kSuperblock,
                      [&](const Chunk& chunk) { kernel(moved.at(chunk), chunk.begin, chunk.end, out.data()); });
    });
  };
  const auto join = [](Sums& left, const Sums& right) {
    for (std::size_t i = 0; i < left.size(); ++i) left[i] = left[i] + right[i];
  };
  Sums zero(static_cast<std::size_t>(panels.left_count * panels.right_count), 0.0);
  if (d > 0 && device.kind == DeviceKind::cuda) {
    cuda::backend()->gram(cuda::on(device), panels, zero.data());
    return zero;
  }
  return tree(d, num_threads, zero, leaf, join);
}

}  // namespace

void gram(List<View<const void>> vectors, View<double> out, int num_threads) {
  const std::int64_t count = vectors.size;
  check::threads("gram", num_threads);
  check::list("gram", "vectors", vectors);
  check::host("gram", "out", out);
  check::view("gram", "out", out, count * count);
  check::Overlaps overlaps;
  overlaps.write_numbers("out", out);
  const std::int64_t size = count > 0 ? vectors.data[0].size : 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const check::Name name("vectors", i);
    const View<const void>& vector = vectors.data[i];
    check::type("gram", name, vector.type, {Type::float32, Type::float64, Type::bfloat16});
    check::read("gram", name, vector, size, overlaps, check::PartTypes::any);
  }
  overlaps.refuse("gram");
  const int threads = threads_worth(overlaps.traffic(), num_threads);

  for (std::int64_t left = 0; left < count; left += kPanel)
    for (std::int64_t right = 0; right <= left; right += kPanel) {
      const GramPanels panels{vectors.data + left, vectors.data + right, std::min(kPanel, count - left),
                              std::min(kPanel, count - right)};
      const Sums sums = panel_products(panels, size, overlaps, threads);
      for (std::int64_t i = 0; i < panels.left_count; ++i)
        for (std::int64_t j = 0; j < (left == right ? i + 1 : panels.right_count); ++j) {
          const double product = sums[static_cast<std::size_t>(i * panels.right_count + j)];
          out.data[(left + i) * count + right + j] = product;
          out.data[(right + j) * count + left + i] = product;
        }
    }
}

}  // namespace afflux
