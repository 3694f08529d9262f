// The codecs of cached rows: a vector of the codec's own type to bytes and back.
#pragma once
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

template <class T>
AFFLUX_FN void copy(const void* from, void* to, std::int64_t begin, std::int64_t end) {
  convert(static_cast<const T*>(from) + begin, static_cast<T*>(to) + begin, end - begin);
}

void encode(Codec codec, const void* vector, unsigned char* row, std::int64_t begin, std::int64_t end) {
  switch (codec) {
    case Codec::float32:
      return copy<float>(vector, row, begin, end);
    case Codec::float64:
      return copy<double>(vector, row, begin, end);
  }
}

void decode(Codec codec, const unsigned char* row, void* vector, std::int64_t begin, std::int64_t end) {
  switch (codec) {
    case Codec::float32:
      return copy<float>(row, vector, begin, end);
    case Codec::float64:
      return copy<double>(row, vector, begin, end);
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
