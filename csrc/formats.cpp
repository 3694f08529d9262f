#include "formats.hpp"

#include <cstring>

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
  const char* base = "type code ";
  switch (type.code) {
    case dlpack::kInt:
      base = "int";
      break;
    case dlpack::kUInt:
      base = "uint";
      break;
    case dlpack::kFloat:
      base = "float";
      break;
    case dlpack::kBfloat:
      base = "bfloat";
      break;
    case dlpack::kComplex:
      base = "complex";
      break;
    case dlpack::kBool:
      base = "bool";
      break;
    default:
      break;
  }
  return base + std::to_string(type.bits) + (type.lanes == 1 ? "" : "x" + std::to_string(type.lanes));
}

bool float_of(dlpack::Type type, Type* out) {
  if (type.lanes != 1) return false;
  if (type.code == dlpack::kFloat && type.bits == 32)
    *out = Type::float32;
  else if (type.code == dlpack::kFloat && type.bits == 64)
    *out = Type::float64;
  else if (type.code == dlpack::kFloat && type.bits == 16)
    *out = Type::float16;
  else if (type.code == dlpack::kBfloat && type.bits == 16)
    *out = Type::bfloat16;
  else
    return false;
  return true;
}

}  // namespace afflux::python
