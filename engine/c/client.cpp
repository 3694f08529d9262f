// The functions of afflux.hpp over the C functions of libafflux.so: the extension is compiled with this file, and with
// nothing of the engine. Exceptions are thrown here, by the caller's own C++ runtime.
#include <atomic>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "afflux/afflux.hpp"
#include "c/internal.h"
#include "cpu/parallel_for.hpp"
#include "cpu/pool.hpp"

namespace afflux {
namespace {

template <class C, class T>
const C* to_c(const T& value) {
  return reinterpret_cast<const C*>(&value);
}
const afflux_conversion* to_c(const Conversion* conversion) {
  return reinterpret_cast<const afflux_conversion*>(conversion);
}
afflux_codec to_c(Codec codec) { return {static_cast<std::int32_t>(codec.coding), codec.bits}; }
Codec from_c(afflux_codec codec) { return {static_cast<Coding>(codec.coding), codec.bits}; }

void check(int status) {
  if (__builtin_expect(status == AFFLUX_OK, 1)) return;
  if (status == AFFLUX_NO_MEMORY) throw std::bad_alloc();
  const char* const message = afflux_last_error();
  if (status == AFFLUX_INVALID) throw Error(message);
  if (status == AFFLUX_UNAVAILABLE) throw Unavailable(message);
  throw std::runtime_error(message);
}

// Returns the text with '?' in place of NUL, at which a C string would end: no name and no setting has one of them.
std::string whole(std::string text) {
  for (char& c : text)
    if (c == '\0') c = '?';
  return text;
}

// A function that the library calls, and an exception of it.
template <class Body>
struct Callback {
  const Body& body;
  std::exception_ptr failure{};

  template <class... Args>
  static void call(void* user, Args... args) {
    Callback& self = *static_cast<Callback*>(user);
    try {
      self.body(args...);
    } catch (...) {
      keep(self, std::current_exception());
    }
  }

 private:
  static void keep(Callback& self, std::exception_ptr exception) {
    static std::atomic_flag writing = ATOMIC_FLAG_INIT;  // of bodies that run in several threads
    while (writing.test_and_set(std::memory_order_acquire)) {
    }
    self.failure = std::move(exception);
    writing.clear(std::memory_order_release);
  }
};

// Calls a function of the library that calls `body`. Throws the error of its status, and an exception of `body`.
template <class Body, class Function, class... Arguments>
void check_calls(const Body& body, const Function& function, Arguments... arguments) {
  Callback<Body> callback{body};
  check(function(arguments..., Callback<Body>::call, &callback));
  if (callback.failure) std::rethrow_exception(callback.failure);
}

Statistics from_c(const afflux_statistics& s) { return {s.sum_of_squares, s.min, s.max, s.first_nonfinite}; }

}  // namespace

Statistics ingest(List<View<const void>> parts, View<void> slot, int num_threads, const Conversion* conversion,
                  std::int64_t until_read) {
  afflux_statistics result;
  check(afflux_ingest_parts(to_c<afflux_views>(parts), to_c<afflux_view>(slot), num_threads, to_c(conversion),
                            until_read, &result));
  return from_c(result);
}

Statistics ingest(View<const void> update, View<void> slot, int num_threads, const Conversion* conversion,
                  std::int64_t until_read) {
  afflux_statistics result;
  check(afflux_ingest(to_c<afflux_view>(update), to_c<afflux_view>(slot), num_threads, to_c(conversion), until_read,
                      &result));
  return from_c(result);
}

void unflatten(List<Unflattened> vectors, int num_threads, bool dry) {
  check(afflux_unflatten(vectors.data, vectors.size, num_threads, dry));
}

void gram(List<View<const void>> vectors, View<double> out, int num_threads) {
  check(afflux_gram(to_c<afflux_views>(vectors), to_c<afflux_memory>(out), num_threads));
}

void inner(const Inner& terms, View<double> out, int num_threads) {
  check(afflux_inner(to_c<afflux_inner_terms>(terms), to_c<afflux_memory>(out), num_threads));
}

bool apply(const Pass& pass, int num_threads, bool dry, Checksums* checksums) {
  int valid = 0;
  if (checksums == nullptr) {
    check(afflux_apply(to_c<afflux_pass>(pass), num_threads, dry, &valid));
    return valid != 0;
  }
  const auto put = [&](int vector, std::int64_t, const std::uint32_t* crcs, std::int64_t count) {
    std::vector<std::uint32_t> list(crcs, crcs + count);
    if (vector == AFFLUX_OUT) checksums->out = std::move(list);
    if (vector == AFFLUX_SUM) checksums->sum = std::move(list);
    if (vector == AFFLUX_ROW) checksums->rows.push_back(std::move(list));
    if (vector == AFFLUX_STATE) checksums->states.push_back(std::move(list));
    if (vector == AFFLUX_RULE_VECTOR) checksums->rule_vectors.push_back(std::move(list));
  };
  *checksums = {};
  check_calls(put, afflux_apply_summed, to_c<afflux_pass>(pass), num_threads, dry, &valid);
  return valid != 0;
}

std::vector<Codec> codecs() {
  std::vector<Codec> list;
  const auto put = [&](afflux_codec codec, const char*) { list.push_back(from_c(codec)); };
  check_calls(put, afflux_list_codecs);
  return list;
}

std::string name(Codec wanted) {
  std::string text;
  const auto put = [&](afflux_codec codec, const char* name) {
    if (from_c(codec) == wanted) text = name;
  };
  check_calls(put, afflux_list_codecs);
  return text;
}

Codec codec_named(const std::string& name) {
  afflux_codec codec;
  check(afflux_codec_named(whole(name).c_str(), &codec));
  return from_c(codec);
}

std::int64_t row_bytes(Codec codec, std::int64_t size) {
  std::int64_t bytes = 0;
  check(afflux_row_bytes(to_c(codec), size, &bytes));
  return bytes;
}

void encode(Codec codec, View<const void> vector, View<unsigned char> row, int num_threads, const RowFacts& facts) {
  check(afflux_encode(to_c(codec), to_c<afflux_view>(vector), to_c<afflux_memory>(row), num_threads,
                      to_c<afflux_row_facts>(facts)));
}

void decode(Codec codec, View<const unsigned char> row, View<void> vector, int num_threads) {
  check(afflux_decode(to_c(codec), to_c<afflux_memory>(row), to_c<afflux_view>(vector), num_threads));
}

std::vector<std::uint32_t> crc32c(View<const unsigned char> data, std::int64_t block, std::int64_t head,
                                  int num_threads, bool table) {
  std::vector<std::uint32_t> list;
  const auto put = [&](int, std::int64_t, const std::uint32_t* crcs, std::int64_t count) {
    list.assign(crcs, crcs + count);
  };
  check_calls(put, afflux_crc32c, to_c<afflux_memory>(data), block, head, num_threads, table);
  return list;
}

double exp(double x) { return afflux_exp(x); }
double log(double x) { return afflux_log(x); }
double pow(double x, double y) { return afflux_pow(x, y); }

void strict_float_mode(const std::function<void()>& body) { check_calls(body, afflux_strict_float_mode); }

std::vector<Backend> backends() {
  std::vector<Backend> list;
  const auto put = [&](const afflux_backend* b) {
    list.push_back({b->name, b->device, b->compiled != 0, b->runs != 0, b->chosen != 0, b->why_not});
  };
  check_calls(put, afflux_list_backends);
  return list;
}

std::string why_not(Device device) { return afflux_why_not({static_cast<std::int32_t>(device.kind), device.index}); }
void use_stream(void* stream) { afflux_use_stream(stream); }
void choose_isa(const std::string& name) { check(afflux_choose_isa(whole(name).c_str())); }

Policy policy() {
  Policy current;
  check(afflux_policy(&current));
  return current;
}
Policy policy_of(const std::string& text, const std::string& asked_by) {
  Policy policy;
  check(afflux_policy_of(whole(text).c_str(), asked_by.c_str(), &policy));
  return policy;
}
void choose_policy(const Policy& policy) { check(afflux_choose_policy(&policy)); }
std::string text(const Policy& policy) { return afflux_policy_text(&policy); }
std::string processor_family() { return afflux_processor_family(); }

int awake_helpers() { return afflux_awake_helpers(); }
void parallel_for_awake(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body) {
  check_calls(body, afflux_parallel_for_awake, count, num_threads);
}

}  // namespace afflux
