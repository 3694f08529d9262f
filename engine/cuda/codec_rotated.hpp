// The rotated codec: each block of threads processes a group of kBlock elements, which is in shared memory while it is
// rotated. Element e of the group is number e / 16 of vector e mod 16.
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
  static constexpr int kThreads = kBlock / kFour;
  static constexpr int kPartials = 4;  // partial sums over a vector's numbers: number i is in sum i mod 4
  struct Shared {
    float values[kBlock], chosen[kBlock];
    double partial[kPartials][kRotations], squares[kRotations];
    float rms[kRotations], scales[kRotations];
  };

  template <class Run>
  static AFFLUX_DEVICE void with_coder(int bits, const Run& run);
  template <class Block, class Heads>
  static AFFLUX_DEVICE void prepare(const Block&, Shared&, const Tile&, const Heads&, int) {}

  // Computes stages `apart` and 2 * apart of the transform over the numbers of each vector, four points in each thread.
  template <class Block>
  static AFFLUX_DEVICE void two_stages(const Block& block, float* values, int apart) {
    block.each([&](int thread) {
      const int vector = thread % kRotations, quarter = thread / kRotations;
      const int first = quarter / apart * (4 * apart) + quarter % apart;
      float x[4];
      AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < 4; ++k) x[k] = values[(first + k * apart) * kRotations + vector];
      const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
      values[first * kRotations + vector] = a + c;
      values[(first + apart) * kRotations + vector] = b + d;
      values[(first + 2 * apart) * kRotations + vector] = a - c;
      values[(first + 3 * apart) * kRotations + vector] = b - d;
    });
  }
  // Computes the Hadamard transform of each vector: stages 1, 2, 4, ... 64.
  template <class Block>
  static AFFLUX_DEVICE void hadamard(const Block& block, float* values) {
    for (int apart = 1; apart < kRotated / 2; apart *= 4) two_stages(block, values, apart);
    block.each([&](int thread) {
      AFFLUX_UNROLL_ON_DEVICE
      for (int i = thread; i < kBlock / 2; i += kThreads) {
        const float a = values[i], b = values[i + kBlock / 2];
        values[i] = a + b;
        values[i + kBlock / 2] = a - b;
      }
    });
  }

  // Returns four elements of a thread, scaled, with the group's random signs: number i of vector l has bit 31 - i mod
  // 32 of word l + 16 (i div 32).
  static AFFLUX_DEVICE Vector4<float> flipped(const Vector4<float>& x, std::uint64_t random, float scale, int thread) {
    const int number = thread * kFour / kRotations, vector = thread * kFour % kRotations;
    Vector4<float> to;
    AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) {
      const std::uint32_t word = static_cast<std::uint32_t>(vector + j + number / 32 * kRotations);
      const std::uint32_t signs = formula::mixed_well(static_cast<std::uint32_t>(random) + word * formula::kWeyl,
                                                      static_cast<std::uint32_t>(random >> 32));
      const std::uint32_t sign = (signs << (number % 32)) & 0x80000000u;
      to.at[j] = formula::float_of(formula::bits_of(x.at[j] * scale) ^ sign);
    }
    return to;
  }

  // Sets shared.partial to the partial sums of <x, y> for each vector; whole_product() adds them.
  template <class Block>
  static AFFLUX_DEVICE void partial_products(const Block& block, Shared& shared, const float* x, const float* y) {
    block.each([&](int thread) {
      const int vector = thread % kRotations, partial = thread / kRotations;
      if (partial >= kPartials) return;
      double sum = 0.0;
      for (int i = partial; i < kRotated; i += kPartials) {
        const int at = i * kRotations + vector;
        sum = formula::dot_term<float>(sum, static_cast<double>(x[at]), static_cast<double>(y[at]));
      }
      shared.partial[partial][vector] = sum;
    });
  }
  static AFFLUX_DEVICE double whole_product(const Shared& shared, int vector) {
    return (shared.partial[0][vector] + shared.partial[2][vector]) +
           (shared.partial[1][vector] + shared.partial[3][vector]);
  }

  // Rotates shared.values back, into `out`.
  template <class Block, class Out>
  static AFFLUX_DEVICE void rotate_back(const Block& block, Shared& shared, std::uint64_t random, Out& out) {
    hadamard(block, shared.values);
    block.each([&](int thread) {
      Vector4<float> rotated;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) rotated.at[j] = shared.values[thread * kFour + j];
      out[thread] = flipped(rotated, random, 1.0f, thread);
    });
  }
};

template <int kBits>
struct RotatedCoder : Rotated {
  struct Read {
    std::uint32_t word;
    Vector4<float> scales;
  };

  static AFFLUX_DEVICE std::int64_t place(const Tile& tile) {
    return formula::place({Coding::rotated, kBits}, tile.begin).facts;
  }
  static constexpr int kCodes = 4 * kRotations;  // the offset of the codes of a group
  static AFFLUX_DEVICE Read read(const Tile&, const RowHeads&, const unsigned char* row, int thread) {
    const float* const scales = on_device<float>(row);
    Read mine{load_word<kBits>(row + kCodes, thread), {}};
    AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) mine.scales.at[j] = scales[(thread * kFour + j) % kRotations];
    return mine;
  }
  template <class Block, class Reads, class Out>
  static AFFLUX_DEVICE void decode(const Block& block, Shared& shared, const Tile& tile, const RowHeads& heads, int,
                                   Reads& read, Out& out) {
    block.each([&](int thread) {
      const std::uint32_t sign_bit = 1u << (kBits - 1);
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const std::uint32_t code = code_in<kBits>(read[thread].word, j);
        const float value = level_at<kBits>(code & (sign_bit - 1)) * read[thread].scales.at[j];
        const std::uint32_t sign = (code & sign_bit) << (32 - kBits);
        shared.values[thread * kFour + j] = formula::float_of(formula::bits_of(value) | sign);
      }
    });
    rotate_back(block, shared, formula::block_bits(heads.old.key, tile.begin / kBlock), out);
  }

  template <class Block, class Floats>
  static AFFLUX_DEVICE void encode(const Block& block, Shared& shared, const Tile& tile, const RowHeads& heads, int,
                                   Floats& x, unsigned char* row, Floats& decoded) {
    const std::uint64_t random = formula::block_bits(heads.renewed.key, tile.begin / kBlock);
    block.each([&](int thread) {
      const Vector4<float> y = flipped(x[thread], random, 1.0f / kRotated, thread);
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) shared.values[thread * kFour + j] = y.at[j];
    });
    hadamard(block, shared.values);
    partial_products(block, shared, shared.values, shared.values);
    block.each([&](int thread) {
      if (thread >= kRotations) return;
      shared.squares[thread] = whole_product(shared, thread);
      shared.rms[thread] = formula::rotated_rms(shared.squares[thread]);
    });
    nearest(block, shared, row);
    partial_products(block, shared, shared.values, shared.chosen);
    block.each([&](int thread) {
      if (thread >= kRotations) return;
      shared.scales[thread] = formula::rotated_scale(shared.squares[thread], whole_product(shared, thread));
      if (row != nullptr) on_device<float>(row)[thread] = shared.scales[thread];
    });
    block.each([&](int thread) {
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const int element = thread * kFour + j;
        shared.values[element] = shared.chosen[element] * shared.scales[element % kRotations];
      }
    });
    rotate_back(block, shared, random, decoded);
  }

  // Sets shared.chosen to the levels nearest to shared.values, before scaling, and writes their codes to the row,
  // unless the row is null.
  template <class Block>
  static AFFLUX_DEVICE void nearest(const Block& block, Shared& shared, unsigned char* row) {
    const std::uint32_t magnitudes = (1u << (kBits - 1)) - 1u;
    typename Block::template Each<std::uint32_t> words;
    block.each([&](int thread) {
      std::uint32_t word = 0;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const int element = thread * kFour + j;
        const float y = shared.values[element];
        const std::uint32_t code = code_of<kBits>(y, shared.rms[element % kRotations]);
        const std::uint32_t level = formula::bits_of(level_at<kBits>(code & magnitudes));
        shared.chosen[element] = formula::float_of(level | (formula::bits_of(y) & 0x80000000u));
        word |= code << (8 * j);
      }
      words[thread] = word;
    });
    if (row == nullptr) return;
    pack<kBits>(block, words);
    block.each([&](int thread) { store_word<kBits>(row + kCodes, thread, words[thread]); });
  }
};

template <class Run>
AFFLUX_DEVICE void Rotated::with_coder(int bits, const Run& run) {
  if (bits == 4) return run(RotatedCoder<4>{});
  if (bits == 2) return run(RotatedCoder<2>{});
  run(RotatedCoder<1>{});
}

}  // namespace afflux::cuda
