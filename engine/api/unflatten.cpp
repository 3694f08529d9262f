#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/overlap.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/parallel_for.hpp"

namespace afflux {
namespace {

bool is_float(Number type) { return type <= Number::bfloat16; }

// Calls body(T{}) for the type of an array of integers or booleans.
template <class Body>
void with_integer(Number type, const Body& body) {
  switch (type) {
    case Number::boolean:
      return body(bool{});
    case Number::int8:
      return body(std::int8_t{});
    case Number::uint8:
      return body(std::uint8_t{});
    case Number::int16:
      return body(std::int16_t{});
    case Number::uint16:
      return body(std::uint16_t{});
    case Number::int32:
      return body(std::int32_t{});
    case Number::uint32:
      return body(std::uint32_t{});
    case Number::int64:
      return body(std::int64_t{});
    case Number::uint64:
      return body(std::uint64_t{});
    default:
      return;
  }
}

std::int64_t size_of(Number type) {
  std::int64_t size = is_float(type) ? bytes(static_cast<Type>(type)) : 0;
  with_integer(type, [&](auto sample) { size = sizeof(sample); });
  return size;
}

double nearest_integer(const View<const void>& vector, std::int64_t i) {
  return std::nearbyint(vector.type == Type::float64 ? static_cast<const double*>(vector.data)[i]
                                                     : static_cast<const float*>(vector.data)[i]);
}

// An array of a vector: `from` is its first element in the vector, `begin` its first one among those of all vectors.
struct Piece {
  const View<const void>* vector;
  const Target* array;
  std::int64_t from, begin;
};

// Throws Error for the first value that an array of integers cannot hold. NaN fails both comparisons.
template <class T>
void check_values(check::Name name, const Piece& piece, T) {
  const double low = static_cast<double>(std::numeric_limits<T>::min());
  const double past = std::ldexp(1.0, std::numeric_limits<T>::digits);
  for (std::int64_t i = 0; i < piece.array->size; ++i) {
    const double value = nearest_integer(*piece.vector, piece.from + i);
    if (!(value >= low && value < past)) check::fail("unflatten", name.str() + " cannot hold " + std::to_string(value));
  }
}

// Writes elements [begin, end) of an array.
void write(const Piece& piece, std::int64_t begin, std::int64_t end) {
  const auto at = [](auto* memory, std::int64_t i, std::int64_t size) { return memory + i * size; };
  const View<const void>& vector = *piece.vector;
  const Number type = piece.array->type;
  auto* const to = static_cast<unsigned char*>(piece.array->data);
  if (is_float(type))
    return kernels().unflatten(
        vector.type, at(static_cast<const unsigned char*>(vector.data), piece.from + begin, bytes(vector.type)),
        static_cast<Type>(type), at(to, begin, size_of(type)), end - begin);
  with_integer(type, [&](auto sample) {
    auto* const out = static_cast<decltype(sample)*>(piece.array->data);
    for (std::int64_t i = begin; i < end; ++i)
      out[i] = static_cast<decltype(sample)>(nearest_integer(vector, piece.from + i));
  });
}

// Checks a vector and the memory of its arrays, and adds the arrays to `pieces`.
void add(const Unflattened& entry, std::int64_t k, std::vector<Piece>& pieces, check::Overlaps& overlaps) {
  const check::Name title("vectors", k);
  check::view("unflatten", title, entry.vector, entry.vector.size);
  check::host("unflatten", title, entry.vector);
  check::type("unflatten", title, entry.vector.type, {Type::float32, Type::float64});
  check::list("unflatten", "arrays", entry.arrays);
  overlaps.read(title, entry.vector);
  std::int64_t begin = pieces.empty() ? 0 : pieces.back().begin + pieces.back().array->size, size = 0;
  for (std::int64_t i = 0; i < entry.arrays.size; ++i) {
    const Target& array = entry.arrays.data[i];
    const check::Name name("arrays", k, i);
    check::memory("unflatten", name, array.data, array.size, array.size, size_of(array.type));
    if (array.size > entry.vector.size - size) check::fail("unflatten", title.str() + " ends before " + name.str());
    overlaps.write(name,
                   View<unsigned char>{static_cast<unsigned char*>(array.data), array.size * size_of(array.type)});
    pieces.push_back({&entry.vector, &array, size, begin});
    begin += array.size;
    size += array.size;
  }
  if (size != entry.vector.size)
    check::fail("unflatten", title.str() + " has " + std::to_string(entry.vector.size) + " elements, its arrays " +
                                 std::to_string(size));
}

}  // namespace

void unflatten(List<Unflattened> vectors, int num_threads, bool dry) {
  check::threads("unflatten", num_threads);
  check::list("unflatten", "vectors", vectors);
  check::Overlaps overlaps;
  std::vector<Piece> pieces;
  std::vector<check::Name> names;
  for (std::int64_t k = 0; k < vectors.size; ++k) {
    add(vectors.data[k], k, pieces, overlaps);
    for (std::int64_t i = 0; i < vectors.data[k].arrays.size; ++i) names.emplace_back("arrays", k, i);
  }
  overlaps.refuse("unflatten");
  if (pieces.empty()) return;
  parallel_for(1, 1, [&](std::int64_t) {  // in this process's floating-point mode, as the writes below
    for (std::size_t i = 0; i < pieces.size(); ++i)
      with_integer(pieces[i].array->type, [&](auto sample) { check_values(names[i], pieces[i], sample); });
  });
  const int threads = threads_worth(overlaps.traffic(), num_threads);
  if (dry) return;
  const auto starts_later = [](std::int64_t element, const Piece& piece) { return element < piece.begin; };
  for_each_piece(pieces.back().begin + pieces.back().array->size, threads, [&](std::int64_t begin, std::int64_t end) {
    auto piece = std::upper_bound(pieces.begin(), pieces.end(), begin, starts_later) - 1;
    for (; begin < end; ++piece) {
      const std::int64_t stop = std::min(end, piece->begin + piece->array->size);
      write(*piece, begin - piece->begin, stop - piece->begin);
      begin = stop;
    }
  });
}

}  // namespace afflux
