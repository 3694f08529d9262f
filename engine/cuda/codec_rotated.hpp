// The rotated codec. Element e of a group of kBlock elements is number e / 16 of vector e mod 16. Each block of threads
// processes half of the vectors of a group, each warp one of them: a thread has four of its numbers while it is
// rotated, so that the threads of a warp need no other warp. They exchange elements with the order of the tile in
// shared memory.
#pragma once
#include "cuda/codec_tile.hpp"
#include "formula/lanes.hpp"
#include "formula/random.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

template <int kBits>
AFFLUX_DEVICE float level_at(std::uint32_t index) {
  float result = formula::level(kBits, 0);
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 1; k < (1 << (kBits - 1)); ++k)
    result = index >= static_cast<std::uint32_t>(k) ? formula::level(kBits, k) : result;
  return result;
}
// Returns the code of y, for a vector with this root mean square.
template <int kBits>
AFFLUX_DEVICE std::uint32_t code_of(float y, float rms) {
  float thresholds[1 << (kBits - 1)];
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k + 1 < (1 << (kBits - 1)); ++k) thresholds[k] = rms * formula::threshold(kBits, k);
  const std::uint32_t bits = formula::bits_of(y);
  return formula::rotated_code<kBits>(bits, formula::float_of(bits & 0x7FFFFFFFu), thresholds);
}
template <int kBits>
struct RotatedCoder;

struct Rotated {
  static constexpr int kThreads = 256, kVectors = kThreads / kWarp, kTilesOfGroup = kRotations / kVectors;
  static constexpr int kThreadsOfNumber = kVectors / kFour;
  static constexpr int kReach = (kRotated - 1) * kRotations + kVectors;
  static constexpr bool kReadsAhead = false;
  static constexpr int kPartials = 4;  // partial sums over a vector's numbers: number i is in sum i mod 4
  static constexpr int kTerms = kRotated / kPartials;
  static_assert(kPartials == kFour && kTerms == kWarp, "each number of a thread is in another partial sum");

  struct Shared {
    alignas(16) float values[kVectors][kRotated];
    alignas(16) double terms[kVectors][kPartials][kTerms + 2];  // + 2: partial sums are in different banks
    double partial[kVectors][kPartials];
    std::uint64_t random[kPrepared][2];
  };

  static AFFLUX_DEVICE std::int64_t first(std::int64_t index) {
    return index / kTilesOfGroup * kBlock + index % kTilesOfGroup * kVectors;
  }
  static AFFLUX_DEVICE int offset(int thread) {
    return thread / kThreadsOfNumber * static_cast<int>(kRotations) + thread % kThreadsOfNumber * kFour;
  }
  static std::int64_t tiles(std::int64_t size) { return (size + kBlock - 1) / kBlock * kTilesOfGroup; }

  template <class Run>
  static AFFLUX_DEVICE void with_coder(int bits, const Run& run);

  template <class Block, class Heads>
  static AFFLUX_DEVICE void prepare(const Block& block, Shared& shared, const Tile& tile, const Heads& heads,
                                    int count) {
    block.each([&](int thread) {
      if (thread >= count) return;
      shared.random[thread][0] = formula::block_bits(heads(thread).old.key, tile.begin / kBlock);
      shared.random[thread][1] = formula::block_bits(heads(thread).renewed.key, tile.begin / kBlock);
    });
  }

  // Returns the thread. What is computed from the result is computed where it is used: if it were kept in registers for
  // all arrivals, a multiprocessor would have registers for two blocks instead of three.
  static AFFLUX_DEVICE int again(int thread) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(thread));
#endif
    return thread;
  }

  // Four numbers of a vector in each thread: those from 4 * (thread mod 32) on of vector thread / 32.
  template <class Block>
  struct Numbers {
    typename Block::template Each<float> at[kFour];
  };

  // Returns the place of a number in a vector's shared values: in different banks for the threads of a warp, whether
  // these have numbers of one vector or elements of the tile.
  static AFFLUX_DEVICE int place_of(int vector, int number) { return number ^ (vector / kFour * 16); }
  static AFFLUX_DEVICE Vector4<float>& values_of(Shared& shared, int thread) {
    const int vector = thread / kWarp;
    return reinterpret_cast<Vector4<float>&>(shared.values[vector][place_of(vector, thread % kWarp * kFour)]);
  }
  template <class Block, class Floats>
  static AFFLUX_DEVICE void to_vectors(const Block& block, Shared& shared, Floats& x, Numbers<Block>& y) {
    block.each([&](int thread) {
      const int number = thread / kThreadsOfNumber, vector = thread % kThreadsOfNumber * kFour;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) shared.values[vector + j][place_of(vector, number)] = x[thread].at[j];
    });
    block.each_in_warp([&](int thread) {
      const Vector4<float> numbers = values_of(shared, thread);
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) y.at[j][thread] = numbers.at[j];
    });
  }
  template <class Block, class Floats>
  static AFFLUX_DEVICE void to_elements(const Block& block, Shared& shared, Numbers<Block>& y, Floats& x) {
    block.each([&](int thread) {
      Vector4<float>& numbers = values_of(shared, thread);
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) numbers.at[j] = y.at[j][thread];
    });
    block.each([&](int thread) {
      const int number = thread / kThreadsOfNumber, vector = thread % kThreadsOfNumber * kFour;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) x[thread].at[j] = shared.values[vector + j][place_of(vector, number)];
    });
  }

  // Computes the Hadamard transform of each vector: stages 1, 2, 4, ... 64.
  template <class Block>
  static AFFLUX_DEVICE void hadamard(const Block& block, Numbers<Block>& y) {
    block.each_alone([&](int thread) {
      const float a = y.at[0][thread] + y.at[1][thread], b = y.at[0][thread] - y.at[1][thread];
      const float c = y.at[2][thread] + y.at[3][thread], d = y.at[2][thread] - y.at[3][thread];
      y.at[0][thread] = a + c;
      y.at[1][thread] = b + d;
      y.at[2][thread] = a - c;
      y.at[3][thread] = b - d;
    });
    AFFLUX_UNROLL_ON_DEVICE
    for (int offset = 1; offset < kWarp; offset *= 2) {
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) block.hadamard(y.at[j], offset);
    }
  }

  // Scales the numbers, and gives them the group's random signs: number i of vector l has bit 31 - i mod 32 of word l +
  // 16 (i div 32).
  template <class Block>
  static AFFLUX_DEVICE void flip(const Block& block, const Tile& tile, std::uint64_t random, float scale,
                                 Numbers<Block>& y) {
    block.each_alone([&](int thread) {
      const int number = again(thread) % kWarp * kFour;
      const std::uint32_t word = static_cast<std::uint32_t>(vector_of(tile, thread) + number / 32 * kRotations);
      const std::uint32_t signs = formula::mixed_well(static_cast<std::uint32_t>(random) + word * formula::kWeyl,
                                                      static_cast<std::uint32_t>(random >> 32))
                                  << (number % 32);
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j)
        y.at[j][thread] = formula::float_of(formula::bits_of(y.at[j][thread] * scale) ^ ((signs << j) & 0x80000000u));
    });
  }

  // Returns the sum of <x, y> over each vector, in all threads of its warp.
  template <class Block>
  static AFFLUX_DEVICE void products(const Block& block, Shared& shared, Numbers<Block>& x, Numbers<Block>& y,
                                     typename Block::template Each<double>& sum) {
    block.each_in_warp([&](int thread) {  // the products are exact
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j)
        shared.terms[thread / kWarp][j][thread % kWarp] =
            static_cast<double>(x.at[j][thread]) * static_cast<double>(y.at[j][thread]);
    });
    block.each_in_warp([&](int thread) {
      const int vector = thread / kWarp, partial = thread % kWarp;
      if (partial >= kPartials) return;
      const Doubles* const terms = reinterpret_cast<const Doubles*>(shared.terms[vector][partial]);
      double total = 0.0;
      AFFLUX_UNROLL_ON_DEVICE
      for (int i = 0; i < kTerms / kFour; ++i) {
        const Doubles four = terms[i];
        total = (((total + four.at[0]) + four.at[1]) + four.at[2]) + four.at[3];
      }
      shared.partial[vector][partial] = total;
    });
    block.each_alone([&](int thread) {
      const double* const partial = shared.partial[thread / kWarp];
      sum[thread] = (partial[0] + partial[2]) + (partial[1] + partial[3]);
    });
  }

  // Returns the number of a thread's vector in the group.
  static AFFLUX_DEVICE int vector_of(const Tile& tile, int thread) {
    return static_cast<int>(tile.begin % kBlock) + thread / kWarp;
  }
};

template <int kBits>
struct RotatedCoder : Rotated {
  // The codes of four numbers in kBits bytes, and the scale of the vector.
  struct Read {
    std::uint32_t word;
    float scale;
  };

  static AFFLUX_DEVICE std::int64_t place(const Tile& tile) {
    return formula::place({Coding::rotated, kBits}, tile.begin).facts;
  }
  // Returns the offset of byte b of a thread's codes in the row's group. The threads 2 i and 2 i + 1 share their bytes:
  // number j of the first one is at bit kBits * (j div kBits) of byte j mod kBits, that of the second one 4 bits
  // higher.
  static AFFLUX_DEVICE std::uint32_t byte_at(const Tile& tile, int thread, int b) {
    return static_cast<std::uint32_t>(4 * kRotations + thread % kWarp / 2 * (16 * kBits) + 16 * b +
                                      vector_of(tile, thread));
  }
  static AFFLUX_DEVICE int bit_of(int j) { return 8 * (j % kBits) + kBits * (j / kBits); }

  static AFFLUX_DEVICE Read read(const Tile& tile, const RowHeads&, const unsigned char* row, int thread) {
    Read mine{0, on_device<float>(row)[vector_of(tile, thread)]};
    AFFLUX_UNROLL_ON_DEVICE
    for (int b = 0; b < kBits; ++b)
      mine.word |= static_cast<std::uint32_t>(*on_device<unsigned char>(row + byte_at(tile, thread, b))) << (8 * b);
    return mine;
  }
  template <class Block, class Reads, class Out>
  static AFFLUX_DEVICE void decode(const Block& block, Shared& shared, const Tile& tile, const RowHeads&, int k,
                                   Reads& read, Out& out) {
    Numbers<Block> y;
    block.each_alone([&](int thread) {
      const std::uint32_t sign_bit = 1u << (kBits - 1), word = read[thread].word >> (4 * (thread % 2));
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const std::uint32_t code = (word >> bit_of(j)) & (2 * sign_bit - 1);
        const float value = level_at<kBits>(code & (sign_bit - 1)) * read[thread].scale;
        y.at[j][thread] = formula::float_of(formula::bits_of(value) | (code & sign_bit) << (32 - kBits));
      }
    });
    hadamard(block, y);
    flip(block, tile, shared.random[k][0], 1.0f, y);
    to_elements(block, shared, y, out);
  }

  template <class Block, class Floats>
  static AFFLUX_DEVICE void encode(const Block& block, Shared& shared, const Tile& tile, const RowHeads&, int k,
                                   Floats& x, unsigned char* row, Floats& decoded) {
    Numbers<Block> y, chosen;
    typename Block::template Each<double> squares, product;
    to_vectors(block, shared, x, y);
    flip(block, tile, shared.random[k][1], 1.0f / kRotated, y);
    hadamard(block, y);
    products(block, shared, y, y, squares);
    choose(block, tile, squares, y, chosen, row);
    products(block, shared, y, chosen, product);
    block.each_alone([&](int thread) {
      const float scale = formula::rotated_scale(squares[thread], product[thread]);
      if (row != nullptr && thread % kWarp == 0) on_device<float>(row)[vector_of(tile, thread)] = scale;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) chosen.at[j][thread] = chosen.at[j][thread] * scale;
    });
    hadamard(block, chosen);
    flip(block, tile, shared.random[k][1], 1.0f, chosen);
    to_elements(block, shared, chosen, decoded);
  }

  // Sets `chosen` to the levels nearest to y, before scaling, and writes their codes to the row, unless the row is
  // null.
  template <class Block>
  static AFFLUX_DEVICE void choose(const Block& block, const Tile& tile, typename Block::template Each<double>& squares,
                                   Numbers<Block>& y, Numbers<Block>& chosen, unsigned char* row) {
    const std::uint32_t magnitudes = (1u << (kBits - 1)) - 1u;
    typename Block::template Each<std::uint32_t> words;
    block.each_alone([&](int thread) {
      const float rms = formula::rotated_rms(squares[thread]);
      std::uint32_t word = 0;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const float number = y.at[j][thread];
        const std::uint32_t code = code_of<kBits>(number, rms);
        const std::uint32_t level = formula::bits_of(level_at<kBits>(code & magnitudes));
        chosen.at[j][thread] = formula::float_of(level | (formula::bits_of(number) & 0x80000000u));
        word |= code << bit_of(j);
      }
      words[thread] = word << (4 * (thread % 2));
    });
    if (row == nullptr) return;
    block.butterfly(words, 1, [](std::uint32_t a, std::uint32_t b) { return a | b; });
    block.each_alone([&](int thread) {
      AFFLUX_UNROLL_ON_DEVICE
      for (int b = 0; b < kBits; ++b)
        if (b % 2 == thread % 2)
          *on_device<unsigned char>(row + byte_at(tile, thread, b)) =
              static_cast<unsigned char>(words[thread] >> (8 * b));
    });
  }
};

template <class Run>
AFFLUX_DEVICE void Rotated::with_coder(int bits, const Run& run) {
  if (bits == 4) return run(RotatedCoder<4>{});
  if (bits == 2) return run(RotatedCoder<2>{});
  run(RotatedCoder<1>{});
}

}  // namespace afflux::cuda
