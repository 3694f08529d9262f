// The codecs, a range of elements at a time: the seam at which a cached row enters a sweep.
#pragma once
#include "cpu/kernels.hpp"
#include "formula/codec.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// row[begin, begin + n) = values[0, n)
AFFLUX_FN void encode_range(Codec codec, const float* values, std::int64_t begin, std::int64_t n, unsigned char* row) {
  switch (codec) {
    case Codec::float32: {
      float* const to = reinterpret_cast<float*>(row) + begin;
#pragma GCC ivdep
      for (std::int64_t i = 0; i < n; ++i) to[i] = formula::encode_float32(values[i]);
    }
  }
}

// values[0, n) = row[begin, begin + n)
AFFLUX_FN void decode_range(Codec codec, const unsigned char* row, std::int64_t begin, std::int64_t n, float* values) {
  switch (codec) {
    case Codec::float32: {
      const float* const from = reinterpret_cast<const float*>(row) + begin;
#pragma GCC ivdep
      for (std::int64_t i = 0; i < n; ++i) values[i] = formula::decode_float32(from[i]);
    }
  }
}

void encode(Codec codec, const float* vector, unsigned char* row, std::int64_t begin, std::int64_t end) {
  encode_range(codec, vector + begin, begin, end - begin, row);
}

void decode(Codec codec, const unsigned char* row, float* vector, std::int64_t begin, std::int64_t end) {
  decode_range(codec, row, begin, end - begin, vector + begin);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
