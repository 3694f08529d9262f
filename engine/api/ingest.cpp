#include <algorithm>
#include <limits>
#include <vector>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/conversion.hpp"
#include "api/overlap.hpp"
#include "api/tree.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/memory_use.hpp"

namespace afflux {
namespace {

void check_slot(const View<void>& slot, std::int64_t size, int num_threads, check::Overlaps& overlaps) {
  check::type("ingest", "slot", slot.type, {Type::float32, Type::float64, Type::bfloat16});
  check::view("ingest", "slot", slot, size);
  check::threads("ingest", num_threads);
  overlaps.write("slot", slot);
  overlaps.refuse("ingest");
}

// A checked conversion, as the sweep uses it; get() is null if nothing is converted.
class Checked {
 public:
  Checked(const Conversion* conversion, std::int64_t size, check::Overlaps& overlaps) : some_(changes(conversion)) {
    if (!some_) return;
    check::conversion("ingest", "base", "scale", *conversion);
    if (reads_base(*conversion)) {
      check::view("ingest", "base", conversion->base, size);
      overlaps.read("base", conversion->base);
    }
    change_ = part_change(*conversion);
  }
  const PartChange* get() const { return some_ ? &change_ : nullptr; }

 private:
  const bool some_;
  PartChange change_{};
};

Statistics statistics(const IngestSums& sums) {
  return {sums.sum_of_squares, sums.min, sums.max, sums.first_nonfinite};
}

// An update on the host may have its slot on a GPU.
bool comes_from_host(const View<const void>& update, const View<void>& slot) {
  return update.device.kind == DeviceKind::cpu && slot.device.kind == DeviceKind::cuda;
}

void check_part(check::Name name, const View<const void>& part, bool from_host, check::Overlaps& overlaps) {
  check::view("ingest", name, part, part.size);
  if (!from_host) return overlaps.read(name, part);
  check::host("ingest", name, part);
  overlaps.read_numbers(name, part);
}

// Executes the sweep. The parts are [begin, end); end->begin is the end of the last part.
Statistics sweep(const Part* begin, const Part* end, bool from_host, const PartChange* change, const View<void>& slot,
                 const check::Overlaps& overlaps, int num_threads, std::int64_t until_read) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const IngestSums nothing{0.0, kInfinity, -kInfinity, -1};
  if (slot.size > 0 && slot.device.kind == DeviceKind::cuda) {
    const cuda::Where where = cuda::on(slot.device);
    if (!from_host) return statistics(cuda::backend()->ingest(where, begin, end, change, slot));
    const int threads = threads_worth(overlaps.traffic(), num_threads);
    return statistics(cuda::backend()->ingest_from_host(where, begin, end, change, slot, threads));
  }
  const auto kernel = kernels().ingest;
  const MemoryUse memory = memory_use(std::max(overlaps.traffic(), until_read));
  const auto leaf = [&](std::int64_t superblock, IngestSums& out) {
    const std::int64_t first = superblock * kSuperblock;
    const auto starts_later = [](std::int64_t i, const Part& part) { return i < part.begin; };
    const Part* const part = std::upper_bound(begin, end, first, starts_later) - 1;
    out = kernel(part, change, memory, slot.type, slot.data, first, std::min(first + kSuperblock, slot.size));
  };
  const auto join = [](IngestSums& left, const IngestSums& right) { add_to(left, right); };
  return statistics(tree(slot.size, threads_worth(overlaps.traffic(), num_threads), nothing, leaf, join));
}

}  // namespace

Statistics ingest(View<const void> update, View<void> slot, int num_threads, const Conversion* conversion,
                  std::int64_t until_read) {
  check::Overlaps overlaps;
  const bool from_host = comes_from_host(update, slot);
  check_part("update", update, from_host, overlaps);
  const Checked change(conversion, update.size, overlaps);
  check_slot(slot, update.size, num_threads, overlaps);
  const Part parts[] = {{update.data, update.type, 0}, {nullptr, update.type, update.size}};
  return sweep(parts, parts + 1, from_host, change.get(), slot, overlaps, num_threads, until_read);
}

Statistics ingest(List<View<const void>> parts, View<void> slot, int num_threads, const Conversion* conversion,
                  std::int64_t until_read) {
  check::list("ingest", "update", parts);
  check::Overlaps overlaps;
  std::vector<Part> laid;
  laid.reserve(static_cast<std::size_t>(parts.size) + 1);
  const bool from_host = parts.size > 0 && comes_from_host(parts.data[0], slot);
  std::int64_t size = 0;
  for (std::int64_t i = 0; i < parts.size; ++i) {
    const View<const void>& part = parts.data[i];
    check_part({"update", i}, part, from_host, overlaps);
    laid.push_back({part.data, part.type, size});
    size += part.size;
  }
  laid.push_back({nullptr, Type::float32, size});
  const Checked change(conversion, size, overlaps);
  check_slot(slot, size, num_threads, overlaps);
  return sweep(laid.data(), laid.data() + parts.size, from_host, change.get(), slot, overlaps, num_threads, until_read);
}

}  // namespace afflux
