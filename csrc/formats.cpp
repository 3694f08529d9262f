#include "formats.hpp"

#include <cstring>
#include <iterator>
#include <utility>

namespace afflux::python {

const char* native_format(const char* format) {
  if (format == nullptr) return "B";
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  const char* const native = "@=<";
#else
  const char* const native = "@=>!";
#endif
  return *format != '\0' && std::strchr(native, *format) != nullptr ? format + 1 : format;
}

std::string name_of_format(const std::string& format) {
  static const struct {
    const char *format, *name;
  } kNames[] = {{"f", "float32"},     {"d", "float64"}, {"e", "float16"}, {"Zf", "complex64"}, {"Zd", "complex128"},
                {"g", "long double"}, {"b", "int8"},    {"h", "int16"},   {"i", "int32"},      {"l", "int64"},
                {"q", "int64"},       {"B", "uint8"},   {"H", "uint16"},  {"I", "uint32"},     {"L", "uint64"},
                {"Q", "uint64"},      {"?", "bool"}};
  for (const auto& entry : kNames)
    if (format == entry.format) return entry.name;
  return "buffer format '" + format + "'";
}

std::string name_of(dlpack::Type type) {
  static const char* const kNames[] = {"int", "uint", "float", "type code ", "bfloat", "complex", "bool"};
  const std::string base = kNames[type.code < std::size(kNames) ? type.code : 3];
  return base + std::to_string(type.bits) + (type.lanes == 1 ? "" : "x" + std::to_string(type.lanes));
}

bool float_of(dlpack::Type type, Type* out) {
  static constexpr std::pair<dlpack::Type, Type> kFloats[] = {{{dlpack::kFloat, 32, 1}, Type::float32},
                                                              {{dlpack::kFloat, 64, 1}, Type::float64},
                                                              {{dlpack::kFloat, 16, 1}, Type::float16},
                                                              {{dlpack::kBfloat, 16, 1}, Type::bfloat16}};
  for (const auto& [float_type, engine_type] : kFloats)
    if (type.code == float_type.code && type.bits == float_type.bits && type.lanes == float_type.lanes) {
      *out = engine_type;
      return true;
    }
  return false;
}

}  // namespace afflux::python
