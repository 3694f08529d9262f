// inner, one superblock, a few rows of lanes at a time. Every vector is widened and shifted into a tile of float64 and
// added to e; then each tile is multiplied with itself and with e. So each vector is read from memory once, although e
// is known only after the last vector. The tiles of about 20 vectors stay in L1, those of more vectors in L2.
#include "cpu/convert.hpp"
#include "cpu/inner_fused.hpp"
#include "cpu/kernels.hpp"
#include "cpu/lane_sum.hpp"
#include "cpu/simd.hpp"
#include "formula/combine.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// The scratch memory of a sweep: a tile of every x_k and of e, and the lanes of every sum.
class InnerWork {
 public:
  InnerWork(std::int64_t count, double* work) : count_(count) {
    constexpr std::uintptr_t kLine = 64;
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(work) % kLine;
    base_ = work + (past == 0 ? 0 : (kLine - past) / sizeof(double));
  }
  AFFLUX_INLINE double* x(std::int64_t k) const { return base_ + k * kInnerTile; }
  AFFLUX_INLINE double* e() const { return x(count_); }
  AFFLUX_INLINE double* squares(std::int64_t k) const { return x(count_ + 1) + k * kLanes; }
  AFFLUX_INLINE double* products(std::int64_t k) const { return squares(count_ + 1 + k); }
  AFFLUX_INLINE double* square_of_e() const { return squares(count_); }

 private:
  std::int64_t count_;
  double* base_;
};

// Returns elements [i, i + width of lanes) of a vector of any type, in float64.
template <class Lanes>
AFFLUX_FN auto widened(Lanes lanes, const View<const void>& vector, std::int64_t i, std::int64_t ahead) {
  auto values = lanes.fill(0.0);
  with_type(vector.type, [&](auto sample) AFFLUX_INLINE {
    const auto* const from = static_cast<const decltype(sample)*>(vector.data) + i;
    lanes.prefetch(from, ahead);
    values = lanes.load(from);
  });
  return values;
}

// Computes a tile of every x_k and, if kWithE, of e: elements [begin, begin + n), and zeros up to a whole row of lanes.
template <bool kShifts, bool kWithE>
AFFLUX_FN void form(const Inner& inner, const InnerWork& work, std::int64_t ahead, std::int64_t begin, std::int64_t n) {
  simd::each_wide(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto shift = lanes.fill(0.0), e = lanes.fill(0.0);
    if (kShifts || (kWithE && inner.memory_weight != 0.0)) {
      const auto memory = widened(lanes, inner.memory, begin + i, ahead);
      if (kShifts) shift = lanes.fill(inner.shift) * memory;
      if (kWithE && inner.memory_weight != 0.0) e = formula::weighted(e, lanes.fill(inner.memory_weight), memory);
    }
    for (std::int64_t k = 0; k < inner.vectors.size; ++k) {
      auto value = widened(lanes, inner.vectors.data[k], begin + i, ahead);
      if (kShifts) value = value + shift;
      lanes.store(work.x(k) + i, value);
      if (kWithE && inner.weights.data[k] != 0.0) e = formula::weighted(e, lanes.fill(inner.weights.data[k]), value);
    }
    lanes.store(work.e() + i, e);
  });
  for (; n % kLanes != 0; ++n)
    for (std::int64_t k = 0; k <= inner.vectors.size; ++k) work.x(k)[n] = 0.0;  // the last is e
}

// Adds to the lanes the tile's products of kCount x's with themselves and, if kWithE, with e.
template <int kCount, bool kWithE>
AFFLUX_FN void multiply(const double* const* x, const double* e, std::int64_t n, double* const* squares,
                        double* const* products) {
  const simd::VectorPack lanes;
  for (int lane = 0; lane < kLanes; lane += simd::kWide) {
    simd::Pack square[kCount], product[kCount];
    AFFLUX_UNROLL
    for (int k = 0; k < kCount; ++k) {
      square[k] = lanes.load(squares[k] + lane);
      product[k] = kWithE ? lanes.load(products[k] + lane) : lanes.fill(0.0);
    }
    for (std::int64_t i = lane; i < n; i += kLanes) {
      const simd::Pack along = kWithE ? lanes.load(e + i) : lanes.fill(0.0);
      AFFLUX_UNROLL
      for (int k = 0; k < kCount; ++k) {
        const simd::Pack value = lanes.load(x[k] + i);
        square[k] = formula::weighted(square[k], value, value);
        if (kWithE) product[k] = formula::weighted(product[k], value, along);
      }
    }
    AFFLUX_UNROLL
    for (int k = 0; k < kCount; ++k) {
      lanes.store(squares[k] + lane, square[k]);
      if (kWithE) lanes.store(products[k] + lane, product[k]);
    }
  }
}

// Adds the products of all x's, two x's at a time: e is read once for both.
template <bool kWithE>
AFFLUX_FN void multiply_all(std::int64_t count, const InnerWork& work, std::int64_t n) {
  std::int64_t k = 0;
  for (; k + 1 < count; k += 2) {
    const double* const x[] = {work.x(k), work.x(k + 1)};
    double* const squares[] = {work.squares(k), work.squares(k + 1)};
    double* const products[] = {work.products(k), work.products(k + 1)};
    multiply<2, kWithE>(x, work.e(), n, squares, products);
  }
  if (k == count) return;
  const double* const x = work.x(k);
  double* const squares = work.squares(k);
  double* const products = work.products(k);
  multiply<1, kWithE>(&x, work.e(), n, &squares, &products);
}

template <bool kShifts, bool kWithE>
AFFLUX_FN void sum_block(const Inner& inner, const InnerWork& work, std::int64_t ahead, std::int64_t begin,
                         std::int64_t end) {
  for (std::int64_t i = begin; i < end; i += kInnerTile) {
    const std::int64_t n = end - i < kInnerTile ? end - i : kInnerTile;
    const std::int64_t rows = (n + kLanes - 1) / kLanes;
    form<kShifts, kWithE>(inner, work, ahead, i, n);
    if (kWithE) {
      const double* const e = work.e();
      double* const square = work.square_of_e();
      multiply<1, false>(&e, nullptr, rows * kLanes, &square, nullptr);
    }
    multiply_all<kWithE>(inner.vectors.size, work, rows * kLanes);
  }
}

}  // namespace

void inner(const Inner& inner, const MemoryUse& memory, std::int64_t begin, std::int64_t end, double* space,
           double* sums) {
  const InnerWork work(inner.vectors.size, space);
  // Lines are prefetched at least this far ahead, because no memory is read while a tile is multiplied.
  constexpr std::int64_t kLeastAhead = 1024;
  const std::int64_t ahead = memory.prefetch > 0 && memory.prefetch < kLeastAhead ? kLeastAhead : memory.prefetch;
  const InnerFused fused = memory.fused ? inner_fused_of(inner) : nullptr;
  const bool shifts = inner.shift != 0.0, with_e = inner.weights.data != nullptr;
  const std::int64_t count = with_e ? 2 * inner.vectors.size + 1 : inner.vectors.size;
  const auto sum = shifts ? (with_e ? sum_block<true, true> : sum_block<true, false>)
                          : (with_e ? sum_block<false, true> : sum_block<false, false>);
  for (std::int64_t block = begin; block < end; block += kBlock) {
    for (std::int64_t i = 0; i < count * kLanes; ++i) work.squares(0)[i] = 0.0;
    const std::int64_t block_end = end - block < kBlock ? end : block + kBlock;
    const std::int64_t tiles = fused == nullptr ? block : block_end - (block_end - block) % kLanes;
    if (fused != nullptr) fused(inner, ahead, block, tiles, work.squares(0));
    if (tiles < block_end) sum(inner, work, ahead, tiles, block_end);
    for (std::int64_t k = 0; k < count; ++k) sums[k] = sums[k] + lane_sum(work.squares(k));
  }
}

}  // namespace afflux::AFFLUX_ISA
