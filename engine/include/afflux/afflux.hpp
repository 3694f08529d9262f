// afflux: the arithmetic of one server round of asynchronous federated learning.
//
//   ingest   one client's update, in one or many parts, into a slot; its norm, min, max and first non-finite value
//   gram     all inner products of K vectors, in one sweep
//   inner    their squares and their inner products with a weighted sum of them, in one sweep
//   apply    combine -> calibrate -> step, in one sweep
//   encode   a vector into a cached row, and back: decode
//   exp ...  elementary functions for weights: log, pow
//   backends the compiled backends, whether they run on this machine, and which one is in use
//   policy   how sweeps on the CPU use memory (policy.hpp)
// Every result is the same bit for bit on any number of threads, on any instruction set (see order.hpp), and on a GPU.
// A call runs on the device of its vectors, which must all be on one device. Lists, weights and the products of `gram`
// are on the host. Entry points check all arguments before they write: after an exception nothing has changed.
// They allocate no memory that grows with d, and never print. Helper threads form a pool, which the first call that
// needs it creates; a forked child creates its own.
#pragma once
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "afflux/inner.hpp"
#include "afflux/order.hpp"
#include "afflux/pass.hpp"
#include "afflux/policy.hpp"
#include "afflux/view.hpp"

namespace afflux {

// The caller's arguments do not fit together; the message names the operation and the argument.
struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The requested backend or device is not in this build, or not on this machine.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Statistics {
  double sum_of_squares;         // of the values written, in float64; a float64 slot's may overflow to inf
  double min, max;               // over all values that are not NaN; +inf, -inf when there is none
  std::int64_t first_nonfinite;  // index of the first NaN or infinity in the slot, -1 if all are finite
};

// The content of a vector.
enum class Kind : std::int32_t { update = 0, gradient = 1, model = 2 };

// A conversion from the vector that a client sends to the kind that a rule takes:
//
//   update = model - base, model = base + update     in the type of the base
//   gradient = -update / scale, update = -gradient scale     in float64, rounded once
// and both, one after the other, between a gradient and a model, with the update in the type of the base. The base that
// is subtracted is first rounded to the type of each part, if that is narrower, because the client has received it so.
struct Conversion {
  Kind from, to;
  View<const void> base;  // params that the client started from, float32 or float64; of conversions of or to a model
  double scale = 1.0;     // client learning rate times local steps, positive; of conversions of or to a gradient
};

// slot = the parts, one after the other, each of any type; the slot is float32, float64 or bfloat16. Statistics depend
// only on the written values, not on the division into parts. Reads and writes each byte once.
// bfloat16 is rounded from float32, to which float64 is rounded first. A value beyond the slot's range counts as
// non-finite. The slot is written even when values are not finite; whether to use it is the caller's decision.
// With a conversion, slot = the converted parts, in the same sweep, which also reads the base.
// `until_read`: bytes that pass through the caches before the slot is read, as far as the caller knows; the policy says
// from how many on the slot is written past the caches.
Statistics ingest(List<View<const void>> parts, View<void> slot, int num_threads = 1,
                  const Conversion* conversion = nullptr, std::int64_t until_read = 0);
Statistics ingest(View<const void> update, View<void> slot, int num_threads = 1, const Conversion* conversion = nullptr,
                  std::int64_t until_read = 0);

// out[i * K + j] = <vectors[i], vectors[j]> in float64, symmetric; each vector is float32, float64 or bfloat16.
// Each is read once for K <= 64; larger K are done in panels of 64 (put vectors of one type side by side: two
// neighbours of one type are done together). Scratch memory is at most a few MB, whatever d is.
void gram(List<View<const void>> vectors, View<double> out, int num_threads = 1);

// In float64: out[k] = <x_k, x_k> and, if there is an e, out[K] = <e, e> and out[K + 1 + k] = <x_k, e>, of K vectors.
// Each vector is read once, the memory too. On the CPU scratch memory is at most 3 KB a vector and thread.
void inner(const Inner& inner, View<double> out, int num_threads = 1);

// CRC-32C of the memory that a sweep has written: of each superblock's bytes, in order. The CRC of a row's head is
// first.
struct Checksums {
  std::vector<std::uint32_t> out, sum;                   // sum: with cached rows
  std::vector<std::vector<std::uint32_t>> rows;          // one for each arrival; empty where the row was kept
  std::vector<std::vector<std::uint32_t>> states;        // of the step
  std::vector<std::vector<std::uint32_t>> rule_vectors;  // none if `next` is empty
};

// A dry run only checks: it throws the exception that the real one would throw, and writes nothing. Returns whether all
// results are valid: every new value of out, of the states and of the rule vectors is finite and at most pass.most, and
// every element of the direction at most combine.most. `checksums`, if given, are computed in the same sweep.
bool apply(const Pass& pass, int num_threads = 1, bool dry = false, Checksums* checksums = nullptr);

// Every coding in all of its widths.
std::vector<Codec> codecs();
// "float32", "affine-4", "affine-vector-4": the coding's name, with the bits of those that have a head.
std::string name(Codec codec);
// Throws Error for a name that no codec has.
Codec codec_named(const std::string& name);
// Bytes of one encoded row of `size` elements.
std::int64_t row_bytes(Codec codec, std::int64_t size);
// The vector is float32, or float64 for the codec float64; its values must be finite. Every byte of the row is written.
void encode(Codec codec, View<const void> vector, View<unsigned char> row, int num_threads = 1,
            const RowFacts& facts = {});
// Throws Error for a row whose head has another codec or size.
void decode(Codec codec, View<const unsigned char> row, View<void> vector, int num_threads = 1);

// The CRC-32C of each block of `block` bytes; the last block may be shorter. If `head` is not 0, the first CRC is that
// of
// the first `head` bytes. `table`: without the CPU's instruction.
std::vector<std::uint32_t> crc32c(View<const unsigned char> data, std::int64_t block, std::int64_t head = 0,
                                  int num_threads = 1, bool table = false);

// These functions give the same bits on every CPU; those of the C library do not. Error below 0.51 ulp, below 1 ulp if
// the result is subnormal; special values as in C99.
double exp(double x);
double log(double x);
double pow(double x, double y);

// Runs `body` on this thread with round-to-nearest and with subnormals, like the engine's own work, and restores the
// caller's floating-point mode. For arithmetic outside the engine that must have the same bits everywhere.
void strict_float_mode(const std::function<void()>& body);

struct Backend {
  std::string name;             // "baseline", "avx2", "avx512", "neon" or "cuda"
  std::string device;           // "cpu" or "cuda"
  bool compiled, runs, chosen;  // cuda is never chosen: it is used for vectors on a GPU
  std::string why_not;          // empty when it runs
};

// Best first.
std::vector<Backend> backends();

// Empty if vectors on this device are supported, else the reason: "this build has no CUDA kernels".
std::string why_not(Device device);

// Sets the cudaStream_t of this thread's later calls; null: the default one. A call waits for the stream only if it
// returns a computed result.
void use_stream(void* stream);

// Chooses the instruction set for all later calls of this process. The initial choice is that of the environment
// variable
// AFFLUX_ISA, else the best that runs. Throws Unavailable for a name that is unknown, not compiled, or does not run
// here.
void choose_isa(const std::string& name);

}  // namespace afflux
