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
//
// Every result is the same bit for bit on any number of threads and any instruction set (see order.hpp), and on a GPU:
// where its vectors lie, a call runs. They lie on one device; lists, weights and the products of `gram` on the host.
// Entry points check everything before they write anything: after an exception nothing has changed.
// They allocate nothing that grows with d, and never print. Threads that help a call are kept for the next one: a pool,
// made by the first call that needs it; a forked child makes its own.
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

// What a vector holds.
enum class Kind : std::int32_t { update = 0, gradient = 1, model = 2 };

// A conversion from the vector that a client sends to the kind that a rule takes:
//
//   update = model - base, model = base + update     in the type of the base
//   gradient = -update / scale, update = -gradient scale     in float64, rounded once
//
// and one after the other between a gradient and a model, the update in the type of the base. What is subtracted is the
// base as the client saw it: rounded to the type of each part first, if that is narrower.
struct Conversion {
  Kind from, to;
  View<const void> base;  // params that the client started from, float32 or float64; of conversions of or to a model
  double scale = 1.0;     // client learning rate times local steps, positive; of conversions of or to a gradient
};

// slot = the parts, one after the other, each of any type; the slot is float32, float64 or bfloat16. Statistics are of
// the values written and depend on them alone, not on how they were cut into parts. Reads and writes each byte once.
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

// CRC-32C of what a sweep has written: of each superblock's bytes, in turn. In a row, that of its head comes before.
struct Checksums {
  std::vector<std::uint32_t> out, sum;                   // sum: with cached rows
  std::vector<std::vector<std::uint32_t>> rows;          // one for each arrival; empty where the row was kept
  std::vector<std::vector<std::uint32_t>> states;        // of the step
  std::vector<std::vector<std::uint32_t>> rule_vectors;  // none if `next` is empty
};

// A dry one only checks: it throws what the real one would, and writes nothing. Returns whether all is sound: every new
// value of out, of the states and of the rule vectors is finite and at most pass.most, and every element of the
// direction at most combine.most. `checksums`, if given, are filled in the same sweep.
bool apply(const Pass& pass, int num_threads = 1, bool dry = false, Checksums* checksums = nullptr);

// Every coding in every width that it comes in.
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

// The CRC-32C of each block of `block` bytes, the last one perhaps shorter; of `head` bytes before them, first, if
// there are some. `table`: without the CPU's instruction.
std::vector<std::uint32_t> crc32c(View<const unsigned char> data, std::int64_t block, std::int64_t head = 0,
                                  int num_threads = 1, bool table = false);

// With the same bits on every CPU, which the C library's do not have. Error below 0.51 ulp, below 1 ulp where the
// result is subnormal; special values as in C99.
double exp(double x);
double log(double x);
double pow(double x, double y);

// Runs `body` on this thread with round-to-nearest and subnormals kept, as the engine's own work is, and puts the
// caller's floating-point mode back: for arithmetic outside the engine that must have the same bits everywhere.
void strict_float_mode(const std::function<void()>& body);

struct Backend {
  std::string name;             // "baseline", "avx2", "avx512", "neon" or "cuda"
  std::string device;           // "cpu" or "cuda"
  bool compiled, runs, chosen;  // cuda is never chosen: it serves the vectors that are on a GPU
  std::string why_not;          // empty when it runs
};

// Best first.
std::vector<Backend> backends();

// Empty if vectors on this device are supported, else the reason: "this build has no CUDA kernels".
std::string why_not(Device device);

// The cudaStream_t that this thread's later calls put their work on; null: the default one. They wait for it only where
// they return something that was computed.
void use_stream(void* stream);

// Chooses the instruction set for all later calls of this process. The environment's AFFLUX_ISA is the initial choice,
// else the best that runs. Throws Unavailable for a name that is unknown, not compiled, or does not run here.
void choose_isa(const std::string& name);

}  // namespace afflux
