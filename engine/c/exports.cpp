// The C functions of libafflux.so, over those of afflux.hpp. No exception leaves them.
#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "afflux/afflux.hpp"
#include "c/guard.hpp"
#include "c/internal.h"
#include "cpu/parallel_for.hpp"
#include "cpu/pool.hpp"

namespace afflux {
namespace {

// The structs of afflux.h have the layouts of those of the C++ headers: their pointers are converted, not copied.
#define AFFLUX_SAME(c, cpp) static_assert(sizeof(c) == sizeof(cpp) && alignof(c) == alignof(cpp), #c)
#define AFFLUX_AT(c, cpp, field) static_assert(offsetof(c, field) == offsetof(cpp, field), #c "." #field)
AFFLUX_SAME(afflux_device, Device);
AFFLUX_SAME(afflux_view, View<void>);
AFFLUX_SAME(afflux_view, View<const void>);
AFFLUX_AT(afflux_view, View<void>, device);
AFFLUX_AT(afflux_view, View<void>, type);
AFFLUX_AT(afflux_view, View<void>, parts);
AFFLUX_SAME(afflux_memory, View<double>);
AFFLUX_SAME(afflux_memory, View<const unsigned char>);
AFFLUX_SAME(afflux_part, PartView);
AFFLUX_AT(afflux_part, PartView, type);
AFFLUX_SAME(afflux_views, List<View<void>>);
AFFLUX_SAME(afflux_conversion, Conversion);
AFFLUX_AT(afflux_conversion, Conversion, base);
AFFLUX_AT(afflux_conversion, Conversion, scale);
AFFLUX_SAME(afflux_parts, Parts);
AFFLUX_AT(afflux_parts, Parts, conversion);
AFFLUX_SAME(afflux_statistics, Statistics);
AFFLUX_AT(afflux_statistics, Statistics, first_nonfinite);
AFFLUX_SAME(afflux_codec, Codec);
AFFLUX_SAME(afflux_row_facts, RowFacts);
AFFLUX_SAME(afflux_noise, Noise);
AFFLUX_AT(afflux_noise, Noise, nonce);
AFFLUX_AT(afflux_noise, Noise, first);
AFFLUX_AT(afflux_noise, Noise, next);
AFFLUX_SAME(afflux_combine, Combine);
AFFLUX_AT(afflux_combine, Combine, params_weight);
AFFLUX_AT(afflux_combine, Combine, trim);
AFFLUX_AT(afflux_combine, Combine, noise);
AFFLUX_SAME(afflux_calibrate, Calibrate);
AFFLUX_AT(afflux_calibrate, Calibrate, sum);
AFFLUX_AT(afflux_calibrate, Calibrate, new_rows);
AFFLUX_AT(afflux_calibrate, Calibrate, facts);
AFFLUX_AT(afflux_calibrate, Calibrate, quantize_direction);
AFFLUX_AT(afflux_calibrate, Calibrate, sum_out);
AFFLUX_AT(afflux_calibrate, Calibrate, factor);
AFFLUX_SAME(afflux_step, Step);
AFFLUX_AT(afflux_step, Step, lr);
AFFLUX_AT(afflux_step, Step, root_scale);
AFFLUX_AT(afflux_step, Step, outs);
AFFLUX_SAME(afflux_rule_vectors, RuleVectors);
AFFLUX_AT(afflux_rule_vectors, RuleVectors, outs);
AFFLUX_SAME(afflux_pass, Pass);
AFFLUX_AT(afflux_pass, Pass, calibrate);
AFFLUX_AT(afflux_pass, Pass, step);
AFFLUX_AT(afflux_pass, Pass, rule_vectors);
AFFLUX_AT(afflux_pass, Pass, most);
AFFLUX_SAME(afflux_inner_terms, Inner);
AFFLUX_AT(afflux_inner_terms, Inner, memory);
AFFLUX_AT(afflux_inner_terms, Inner, memory_weight);
#define AFFLUX_STEP(kind, number) static_assert(static_cast<int>(StepKind::kind) == number, #kind)
AFFLUX_STEP(sgd, AFFLUX_SGD);
AFFLUX_STEP(momentum, AFFLUX_MOMENTUM);
AFFLUX_STEP(adam, AFFLUX_ADAM);
AFFLUX_STEP(amsgrad, AFFLUX_AMSGRAD);
AFFLUX_STEP(adagrad, AFFLUX_ADAGRAD);
AFFLUX_STEP(yogi, AFFLUX_YOGI);
AFFLUX_STEP(assign, AFFLUX_ASSIGN);
AFFLUX_STEP(nesterov, AFFLUX_NESTEROV);

// For the caller's structs only: this file itself accesses an object by one of its two types.
template <class T, class C>
const T& as(const C* struct_of_c) {
  return *reinterpret_cast<const T*>(struct_of_c);
}

Codec from_c(afflux_codec codec) { return {static_cast<Coding>(codec.coding), codec.bits}; }
afflux_codec to_c(Codec codec) { return {static_cast<int32_t>(codec.coding), codec.bits}; }
afflux_statistics to_c(const Statistics& of) { return {of.sum_of_squares, of.min, of.max, of.first_nonfinite}; }

thread_local std::string last_error, last_text;

const char* keep(std::string text) {
  last_text = std::move(text);
  return last_text.c_str();
}

// The numbers of a C struct that are members of an enumeration of C++, which a caller in C may set to anything.
void check_number(const char* name, std::int32_t number, std::int32_t most) {
  if (number < 0 || number > most)
    throw Error("[afflux.h] " + std::string(name) + " is " + std::to_string(number) + ", must be from 0 to " +
                std::to_string(most));
}

void check_view(const afflux_view& view);

void check_conversion(const afflux_conversion* conversion) {
  if (conversion == nullptr) return;
  check_number("conversion.from", conversion->from, AFFLUX_MODEL);
  check_number("conversion.to", conversion->to, AFFLUX_MODEL);
  check_view(conversion->base);
}

void check_view(const afflux_view& view) {
  check_number("type", view.type, AFFLUX_BFLOAT16);
  check_number("device.kind", view.device.kind, AFFLUX_CUDA);
  if (view.parts == nullptr) return;
  for (std::int64_t k = 0; view.parts->list.data != nullptr && k < view.parts->list.size; ++k)
    check_number("type", view.parts->list.data[k].type, AFFLUX_BFLOAT16);
  check_conversion(view.parts->conversion);
}

void check_views(const afflux_views& views) {
  for (std::int64_t k = 0; views.data != nullptr && k < views.size; ++k) check_view(views.data[k]);
}

void check_pass(const afflux_pass& pass) {
  check_number("step.kind", pass.step.kind, static_cast<std::int32_t>(std::size(kStepKinds)) - 1);
  check_number("calibrate.kind", pass.calibrate.kind, AFFLUX_CACHED_MEAN);
  check_view(pass.params);
  check_view(pass.out);
  for (const afflux_views& views :
       {pass.combine.updates, pass.step.states, pass.step.outs, pass.rule_vectors.vectors, pass.rule_vectors.outs})
    check_views(views);
}

}  // namespace

int failed(int status, const char* message) {
  try {
    last_error = message;
  } catch (...) {
    return AFFLUX_NO_MEMORY;
  }
  return status;
}

}  // namespace afflux

using namespace afflux;

extern "C" {

int32_t afflux_abi(void) { return AFFLUX_ABI; }
const char* afflux_version(void) { return AFFLUX_VERSION; }
int32_t afflux_order_version(void) { return kOrderVersion; }
const char* afflux_last_error(void) { return last_error.c_str(); }

int afflux_ingest(const afflux_view* update, const afflux_view* slot, int num_threads,
                  const afflux_conversion* conversion, int64_t until_read, afflux_statistics* statistics) {
  return guarded([&] {
    check_view(*update);
    check_view(*slot);
    check_conversion(conversion);
    *statistics = to_c(ingest(as<View<const void>>(update), as<View<void>>(slot), num_threads,
                              reinterpret_cast<const Conversion*>(conversion), until_read));
  });
}

int afflux_ingest_parts(const afflux_views* parts, const afflux_view* slot, int num_threads,
                        const afflux_conversion* conversion, int64_t until_read, afflux_statistics* statistics) {
  return guarded([&] {
    check_views(*parts);
    check_view(*slot);
    check_conversion(conversion);
    *statistics = to_c(ingest(as<List<View<const void>>>(parts), as<View<void>>(slot), num_threads,
                              reinterpret_cast<const Conversion*>(conversion), until_read));
  });
}

int afflux_gram(const afflux_views* vectors, const afflux_memory* out, int num_threads) {
  return guarded([&] {
    check_views(*vectors);
    gram(as<List<View<const void>>>(vectors), as<View<double>>(out), num_threads);
  });
}

int afflux_inner(const afflux_inner_terms* terms, const afflux_memory* out, int num_threads) {
  return guarded([&] {
    check_views(terms->vectors);
    check_view(terms->memory);
    inner(as<Inner>(terms), as<View<double>>(out), num_threads);
  });
}

void afflux_pass_init(afflux_pass* pass) {
  static_assert(std::is_trivially_copyable_v<Pass>);
  const Pass defaults;
  std::memcpy(pass, &defaults, sizeof *pass);
}

int afflux_apply(const afflux_pass* pass, int num_threads, int dry, int* valid) {
  return guarded([&] {
    check_pass(*pass);
    *valid = apply(as<Pass>(pass), num_threads, dry != 0);
  });
}

int afflux_apply_summed(const afflux_pass* pass, int num_threads, int dry, int* valid, afflux_put_crcs put,
                        void* user) {
  return guarded([&] {
    check_pass(*pass);
    Checksums sums;
    *valid = apply(as<Pass>(pass), num_threads, dry != 0, &sums);
    const auto report = [&](int vector, std::int64_t index, const std::vector<std::uint32_t>& crcs) {
      put(user, vector, index, crcs.data(), static_cast<std::int64_t>(crcs.size()));
    };
    const auto report_all = [&](int vector, const std::vector<std::vector<std::uint32_t>>& all) {
      for (std::size_t k = 0; k < all.size(); ++k) report(vector, static_cast<std::int64_t>(k), all[k]);
    };
    report(AFFLUX_OUT, 0, sums.out);
    report(AFFLUX_SUM, 0, sums.sum);
    report_all(AFFLUX_ROW, sums.rows);
    report_all(AFFLUX_STATE, sums.states);
    report_all(AFFLUX_RULE_VECTOR, sums.rule_vectors);
  });
}

int afflux_codec_named(const char* name, afflux_codec* codec) {
  return guarded([&] { *codec = to_c(codec_named(name)); });
}

int afflux_row_bytes(afflux_codec codec, int64_t size, int64_t* bytes) {
  return guarded([&] { *bytes = row_bytes(from_c(codec), size); });
}

int afflux_encode(afflux_codec codec, const afflux_view* vector, const afflux_memory* row, int num_threads,
                  const afflux_row_facts* facts) {
  return guarded([&] {
    check_view(*vector);
    encode(from_c(codec), as<View<const void>>(vector), as<View<unsigned char>>(row), num_threads,
           facts == nullptr ? RowFacts{} : as<RowFacts>(facts));
  });
}

int afflux_decode(afflux_codec codec, const afflux_memory* row, const afflux_view* vector, int num_threads) {
  return guarded([&] {
    check_view(*vector);
    decode(from_c(codec), as<View<const unsigned char>>(row), as<View<void>>(vector), num_threads);
  });
}

double afflux_exp(double x) { return afflux::exp(x); }
double afflux_log(double x) { return afflux::log(x); }
double afflux_pow(double x, double y) { return afflux::pow(x, y); }

int afflux_choose_isa(const char* name) {
  return guarded([&] { choose_isa(name); });
}

const char* afflux_isa(void) {
  const char* name = nullptr;
  guarded([&] {
    for (const Backend& backend : backends())
      if (backend.chosen) name = keep(backend.name);
  });
  return name;
}

int afflux_crc32c(const afflux_memory* data, int64_t block, int64_t head, int num_threads, int table,
                  afflux_put_crcs put, void* user) {
  return guarded([&] {
    const auto crcs = crc32c(as<View<const unsigned char>>(data), block, head, num_threads, table != 0);
    put(user, AFFLUX_OUT, 0, crcs.data(), static_cast<std::int64_t>(crcs.size()));
  });
}

int afflux_unflatten(const void* vectors, int64_t count, int num_threads, int dry) {
  return guarded([&] { unflatten({static_cast<const Unflattened*>(vectors), count}, num_threads, dry != 0); });
}

int afflux_list_codecs(afflux_put_codec put, void* user) {
  return guarded([&] {
    for (const Codec codec : codecs()) put(user, to_c(codec), name(codec).c_str());
  });
}

int afflux_list_backends(afflux_put_backend put, void* user) {
  return guarded([&] {
    for (const Backend& b : backends()) {
      const afflux_backend backend{b.name.c_str(), b.device.c_str(), b.compiled, b.runs, b.chosen, b.why_not.c_str()};
      put(user, &backend);
    }
  });
}

const char* afflux_why_not(afflux_device device) {
  return keep(why_not({static_cast<DeviceKind>(device.kind), device.index}));
}
void afflux_use_stream(void* stream) { use_stream(stream); }

int afflux_policy(void* result) {
  return guarded([&] { *static_cast<Policy*>(result) = policy(); });
}
int afflux_policy_of(const char* text, const char* asked_by, void* result) {
  return guarded([&] { *static_cast<Policy*>(result) = policy_of(text, asked_by); });
}
int afflux_choose_policy(const void* wanted) {
  return guarded([&] { choose_policy(*static_cast<const Policy*>(wanted)); });
}
const char* afflux_policy_text(const void* settings) { return keep(text(*static_cast<const Policy*>(settings))); }
const char* afflux_processor_family(void) { return keep(processor_family()); }

int afflux_strict_float_mode(void (*body)(void* user), void* user) {
  return guarded([&] { strict_float_mode([&] { body(user); }); });
}

int afflux_awake_helpers(void) { return awake_helpers(); }
int afflux_parallel_for_awake(int64_t count, int num_threads, afflux_body body, void* user) {
  return guarded([&] { parallel_for_awake(count, num_threads, [&](std::int64_t index) { body(user, index); }); });
}

}  // extern "C"
