// gram, one superblock: all inner products between two panels of vectors, block by block. A tile of 3 x 3 pairs is
// summed lane group by lane group (lanes are independent, so their grouping changes no bit). The sums of a tile fill
// the registers; every loop over a tile is unrolled explicitly, because GCC would leave some sums in memory. Each value
// that is loaded and widened is used for three products. Meanwhile the next block is prefetched. Types are chosen for
// each tile, so that vectors of several types are also read from memory once.
#include "afflux/order.hpp"
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"
#include "cpu/lane_sum.hpp"
#include "cpu/simd.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

constexpr int kSide = 3;
// Native vectors of a lane group. With 32 registers (AVX-512) a group is a whole cache line of float32; 16 registers
// hold one sum for each pair.
constexpr int kParts = simd::kWidth == 8 ? 2 : 1;
constexpr int kGroupLanes = kParts * simd::kWidth;
static_assert(kLanes % kGroupLanes == 0, "lane groups must divide the lanes");

// Prefetches the next block of every vector, a few cache lines at a time, during all of the work on this block:
// otherwise the memory would be idle while the products are computed.
class Prefetcher {
 public:
  Prefetcher(const GramPanels& panels, std::int64_t begin) : panels_(panels), begin_(begin) {
    const std::int64_t rows = tiles(panels.left_count), columns = tiles(panels.right_count);
    const bool symmetric = panels.left == panels.right;
    count_ = panels.left_count + (symmetric ? 0 : panels.right_count);
    std::int64_t lines = 0;
    for (std::int64_t k = 0; k < count_; ++k) lines += kBlock * size_of(vector(k).type) / kLine;
    const std::int64_t calls = (symmetric ? rows * (rows + 1) / 2 : rows * columns) * (kBlock / kEvery / kGroupLanes);
    lines_ = (lines + calls - 1) / calls;
    if (begin + kBlock > panels.left[0].size) count_ = 0;
  }
  // Prefetches some lines; to be called for every i, in steps of kLanes.
  AFFLUX_INLINE void fetch(std::int64_t i) {
    if (i % (kEvery * kLanes) >= kLanes) return;
    for (std::int64_t left = lines_; left > 0; --left) {
      if (at_ == end_) {
        if (next_ == count_) return;
        const View<const void>& view = vector(next_++);
        at_ = static_cast<const char*>(view.data) + begin_ * size_of(view.type);
        end_ = at_ + kBlock * size_of(view.type);
      }
      __builtin_prefetch(at_, 0, 2);
      at_ += kLine;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64, kEvery = 4;  // more lines at once would delay each other
  static AFFLUX_INLINE std::int64_t tiles(std::int64_t count) { return (count + kSide - 1) / kSide; }
  AFFLUX_INLINE const View<const void>& vector(std::int64_t k) const {
    return k < panels_.left_count ? panels_.left[k] : panels_.right[k - panels_.left_count];
  }

  const GramPanels& panels_;
  std::int64_t begin_, count_, lines_, next_ = 0;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

// Sets products[a][b] to the block's inner product of x[a] and y[b]; in a triangle, where y is x, only for b <= a.
template <int kRows, bool kTriangle, class X, class Y>
AFFLUX_FN void block_products(const X* const* x, const Y* const* y, std::int64_t n, double (*products)[kSide],
                              Prefetcher& prefetcher) {
  constexpr int kColumns = kTriangle ? kRows : kSide;
  double lanes[kRows][kColumns][kLanes];
  const std::int64_t whole = n - n % kLanes;
  for (int lane = 0; lane < kLanes; lane += kGroupLanes) {
    simd::Doubles sum[kRows][kColumns][kParts] = {};
    for (std::int64_t i = lane; i < whole; i += kLanes) {
      prefetcher.fetch(i);
      AFFLUX_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const std::int64_t at = i + part * simd::kWidth;
        simd::Doubles right[kColumns];
        AFFLUX_UNROLL
        for (int b = 0; b < kColumns; ++b) right[b] = simd::Vector::load(y[b] + at);
        AFFLUX_UNROLL
        for (int a = 0; a < kRows; ++a) {
          const simd::Doubles left = kTriangle ? right[a] : simd::Vector::load(x[a] + at);
          AFFLUX_UNROLL
          for (int b = 0; b < (kTriangle ? a + 1 : kColumns); ++b)
            sum[a][b][part] = simd::dot_term<X, Y>(sum[a][b][part], left, right[b]);
        }
      }
    }
    AFFLUX_UNROLL
    for (int a = 0; a < kRows; ++a) {
      AFFLUX_UNROLL
      for (int b = 0; b < (kTriangle ? a + 1 : kColumns); ++b) {
        AFFLUX_UNROLL
        for (int part = 0; part < kParts; ++part)
          simd::Vector::store(lanes[a][b] + lane + part * simd::kWidth, sum[a][b][part]);
      }
    }
  }
  for (int a = 0; a < kRows; ++a)
    for (int b = 0; b < (kTriangle ? a + 1 : kColumns); ++b) {
      double* const sums = lanes[a][b];
      for (std::int64_t i = whole; i < n; ++i)
        sums[i - whole] =
            formula::dot_term<X, Y>(sums[i - whole], simd::Single::load(x[a] + i), simd::Single::load(y[b] + i));
      products[a][b] = lane_sum(sums);
    }
}

// Up to kSide neighbours of one type in a panel. The last one replaces those that are missing.
struct Run {
  Run(const View<const void>* panel, std::int64_t end, std::int64_t first)
      : vectors(panel + first), count(1), type(panel[first].type) {
    while (count < kSide && first + count < end && vectors[count].type == type) ++count;
  }
  template <class T>
  AFFLUX_INLINE void blocks(std::int64_t i, const T* out[kSide]) const {
    for (int k = 0; k < kSide; ++k) out[k] = static_cast<const T*>(vectors[k < count ? k : count - 1].data) + i;
  }

  const View<const void>* vectors;
  std::int64_t count;
  Type type;
};

template <bool kTriangle, class X, class Y>
AFFLUX_FN void products_of(const Run& left, const Run& right, std::int64_t i, std::int64_t n, double (*products)[kSide],
                           Prefetcher& prefetcher) {
  const X* x[kSide];
  const Y* y[kSide];
  left.blocks(i, x);
  right.blocks(i, y);
  switch (left.count) {
    case 1:
      return block_products<1, kTriangle>(x, y, n, products, prefetcher);
    case 2:
      return block_products<2, kTriangle>(x, y, n, products, prefetcher);
    default:
      return block_products<3, kTriangle>(x, y, n, products, prefetcher);
  }
}

// Computes the products of the block [i, i + n) of both runs.
AFFLUX_FN void run_products(const Run& left, const Run& right, std::int64_t i, std::int64_t n,
                            double (*products)[kSide], Prefetcher& prefetcher) {
  with_type(left.type, [&](auto x) AFFLUX_INLINE {
    using X = decltype(x);
    if (left.vectors == right.vectors) return products_of<true, X, X>(left, right, i, n, products, prefetcher);
    with_type(right.type, [&](auto y) AFFLUX_INLINE {
      products_of<false, X, decltype(y)>(left, right, i, n, products, prefetcher);
    });
  });
}

}  // namespace

void gram(const GramPanels& panels, std::int64_t begin, std::int64_t end, double* sums) {
  const std::int64_t rows = panels.left_count, columns = panels.right_count;
  const bool symmetric = panels.left == panels.right;
  for (std::int64_t i = begin; i < end; i += kBlock) {
    const std::int64_t n = end - i < kBlock ? end - i : kBlock;
    Prefetcher prefetcher(panels, i + kBlock);
    for (std::int64_t row = 0; row < rows;) {
      const Run x(panels.left, rows, row);
      for (std::int64_t column = 0; column < (symmetric ? row + 1 : columns);) {
        const Run y(panels.right, columns, column);
        double products[kSide][kSide];
        run_products(x, y, i, n, products, prefetcher);
        double* const cells = sums + row * columns + column;
        for (std::int64_t a = 0; a < x.count; ++a)
          for (std::int64_t b = 0; b < (x.vectors == y.vectors ? a + 1 : y.count); ++b)
            cells[a * columns + b] = cells[a * columns + b] + products[a][b];
        column += y.count;
      }
      row += x.count;
    }
  }
}

}  // namespace afflux::AFFLUX_ISA
