// afflux: the arithmetic of one server round of asynchronous federated learning.
//
//   ingest    copies one client's update, in one or many parts, into a slot; returns its sum of squares, min, max and
//             first non-finite value
//   unflatten copies flat vectors into the arrays of a model (unflatten.hpp)
//   gram      computes all inner products of K vectors in one sweep
//   inner     computes the squares of K vectors, and their inner products with a weighted sum of them, in one sweep
//   apply     combine -> calibrate -> step, in one sweep
//   encode    encodes a vector into a cached row; `decode` is the inverse
//   exp ...   elementary functions for weights: exp, log, pow
//   backends  lists the compiled backends, whether they run on this machine, and which one is in use
//   policy    returns the settings by which sweeps on the CPU use memory (policy.hpp)
//
// Results. Every result is the same bit for bit on any number of threads, on any instruction set (see order.hpp), and
// on a GPU.
//
// Devices. A call runs on the device of its vectors, which must all be on one device; only the update of `ingest` may
// be on the host, and its slot on a GPU. Lists, weights and the products of `gram` and `inner` are on the host.
//
// Errors. An entry point checks all arguments before it writes: after an Error or Unavailable, nothing has changed. It
// throws std::bad_alloc where memory is short, and std::runtime_error for an error of CUDA.
//
// Memory and threads. On the CPU, scratch memory does not grow with d, apart from the checksums: 4 bytes for each
// superblock (65,536 elements) and 4 for each piece of a sweep, of every vector; and from vectors in parts: 24 bytes
// for each part, and 32 for each piece. On a GPU, the reductions (`ingest`, `gram`, `inner`) allocate one partial
// result for each superblock; updates from the host pass through at most 24 MiB of pinned memory, and 24 MiB of the
// GPU, which are kept. The first call that needs helper threads creates their pool; a forked child creates its own. No
// function prints.
#pragma once
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "afflux/inner.hpp"
#include "afflux/order.hpp"
#include "afflux/parts.hpp"
#include "afflux/pass.hpp"
#include "afflux/policy.hpp"
#include "afflux/unflatten.hpp"
#include "afflux/view.hpp"

namespace afflux {

// The error for arguments that are invalid or do not fit together. The message names the operation and the argument.
struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The error for a backend or device that is not in this build, or not on this machine.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The statistics of a slot that `ingest` has written.
struct Statistics {
  double sum_of_squares;         // of the written values, in float64; may overflow to inf for a float64 slot
  double min, max;               // over all values that are not NaN; +inf and -inf if there are none
  std::int64_t first_nonfinite;  // index of the first NaN or infinity in the slot, -1 if all values are finite
};

// The content of a vector.
enum class Kind : std::int32_t { update = 0, gradient = 1, model = 2 };

// A conversion from the vector that a client sends to the kind that a rule takes:
//
//   update = model - base,        model = base + update
//   gradient = -update / scale,   update = -gradient * scale
//
// A conversion between a gradient and a model does both, one after the other. All of it is computed in float64, from
// the values of the parts and of the base, whatever their types; the result is rounded once, to the type of the slot.
// Before a subtraction, the base is rounded to the type of each part if that type is narrower: the client has received
// the base in that type.
struct Conversion {
  Kind from, to;
  View<const void> base;  // params that the client started from, float32 or float64; used if a kind is model
  double scale = 1.0;     // client learning rate times local steps, greater than 0; used if a kind is gradient
};

// Copies the parts, one after the other, into the slot, and returns the statistics of the written values. The parts
// have any types; the slot is float32, float64 or bfloat16, and as long as all parts together. Values are rounded to
// nearest, ties to even; float64 is rounded to float32 before it is rounded to bfloat16.
//
// The statistics depend only on the written values, not on the division into parts. A value that overflows the slot's
// type counts as non-finite. The slot is written even if values are not finite: the caller decides whether to use it.
// With a conversion, the slot receives the converted parts, in the same sweep, which also reads the base.
//
// Cost: each byte of the parts is read once, and each byte of the slot is written once. `until_read` is the caller's
// estimate of the bytes that pass through the caches before the slot is read. Policy::stream says from how many bytes
// on the slot is written past the caches.
//
// From the host to a slot on a GPU: up to `num_threads` threads copy the update into pinned memory, in pieces, while
// the GPU reads the piece before. An update in pinned memory is read by the GPU itself. The base is on the GPU.
Statistics ingest(List<View<const void>> parts, View<void> slot, int num_threads = 1,
                  const Conversion* conversion = nullptr, std::int64_t until_read = 0);
Statistics ingest(View<const void> update, View<void> slot, int num_threads = 1, const Conversion* conversion = nullptr,
                  std::int64_t until_read = 0);

// Computes out[i * K + j] = <vectors[i], vectors[j]> in float64, for K vectors of d elements. `out` is symmetric, has
// K * K elements, and is on the host. Each vector is float32, float64 or bfloat16, flat or in parts (parts.hpp).
//
// Cost: on the CPU each vector is read from memory once if K <= 64; larger K are processed in panels of 64 vectors. Up
// to three neighbours of one type are processed together, so put vectors of one type side by side. Scratch memory is at
// most a few MB on the CPU; on a GPU it is 8 bytes for each superblock and pair of a panel.
void gram(List<View<const void>> vectors, View<double> out, int num_threads = 1);

// Computes in float64, for the K vectors x_k of `inner`: out[k] = <x_k, x_k> and, if there is an e, out[K] = <e, e> and
// out[K + 1 + k] = <x_k, e>. `out` is on the host; it has K elements, or 2 * K + 1 with an e.
//
// Cost: on the CPU each vector, and the memory, is read from memory once, and scratch memory is about 3 KB for each
// vector and thread.
void inner(const Inner& inner, View<double> out, int num_threads = 1);

// The CRC-32C checksums of the memory that a sweep has written: for each vector, one CRC for the bytes of each
// superblock, in order. For a row that has a head, the CRC of the head comes first.
struct Checksums {
  std::vector<std::uint32_t> out, sum;                   // sum: only with cached rows
  std::vector<std::vector<std::uint32_t>> rows;          // one item for each arrival, empty if the row was not replaced
  std::vector<std::vector<std::uint32_t>> states;        // of the step
  std::vector<std::vector<std::uint32_t>> rule_vectors;  // no items if `next` is empty
};

// Executes the pass in one sweep; its vectors may be in parts (parts.hpp). Returns true if all results are valid: every
// new value of out, of the states and of the rule vectors is finite and at most pass.most in absolute value, and every
// element of the updates that are read is at most combine.most in absolute value, if that is given. Results are
// written even if they are invalid.
//
// `dry`: checks the arguments, throws the exception that the real run would throw for them, writes nothing, and returns
// true. `checksums`, if given, are computed in the same sweep; on a GPU they throw Unavailable, and for a written
// vector in parts they throw Error.
bool apply(const Pass& pass, int num_threads = 1, bool dry = false, Checksums* checksums = nullptr);

// Returns every coding in all of its widths.
std::vector<Codec> codecs();
// Returns the coding's name, with the bits if the codec has a head: "float32", "affine-4", "affine-vector-4".
std::string name(Codec codec);
// Returns the codec with this name. Throws Error if there is none.
Codec codec_named(const std::string& name);
// Returns the number of bytes of one encoded row of `size` elements. Throws Error for a codec that does not exist, and
// for a size that is negative or larger than INT64_MAX / 16.
std::int64_t row_bytes(Codec codec, std::int64_t size);
// Encodes a vector into a row of row_bytes(codec, vector.size) bytes; every byte of the row is written. The vector is
// float32, or float64 for the codec float64. Its values must be finite: they are not checked. A row with a head must be
// aligned to 8 bytes, any other row to the size of its elements. Throws Error for facts that the codec cannot use.
void encode(Codec codec, View<const void> vector, View<unsigned char> row, int num_threads = 1,
            const RowFacts& facts = {});
// Decodes a row into a vector, of the same types and sizes as for `encode`. Throws Error for a row with a damaged head,
// or with a head of another codec or size.
void decode(Codec codec, View<const unsigned char> row, View<void> vector, int num_threads = 1);

// Returns the CRC-32C of each block of `block` bytes of host memory; the last block may be shorter. If `head` is not 0,
// the first CRC is that of the first `head` bytes, and the blocks begin after them. `table`: computes with a table
// instead of the CPU's CRC instruction; the result is the same.
std::vector<std::uint32_t> crc32c(View<const unsigned char> data, std::int64_t block, std::int64_t head = 0,
                                  int num_threads = 1, bool table = false);

// Elementary functions that return the same bits on every CPU; those of the C library do not. The error is below 0.51
// ulp, or below 1 ulp if the result is subnormal. Special values are those of C99.
double exp(double x);
double log(double x);
double pow(double x, double y);

// Runs `body` on this thread with round-to-nearest and with subnormals, as the engine computes, then restores the
// caller's floating-point mode. Use it for arithmetic outside the engine that must have the same bits everywhere.
void strict_float_mode(const std::function<void()>& body);

// An instruction set of the CPU, or CUDA.
struct Backend {
  std::string name;             // "baseline", "avx2", "avx512", "neon" or "cuda"
  std::string device;           // "cpu" or "cuda"
  bool compiled, runs, chosen;  // cuda is never chosen: it is used for vectors on a GPU
  std::string why_not;          // the reason why it does not run; empty if it runs
};

// Returns the compiled instruction sets, best first, then "cuda". Throws Unavailable as choose_isa() does, if no
// instruction set is chosen yet and AFFLUX_ISA is not one.
std::vector<Backend> backends();

// Returns an empty text if vectors on this device are supported, else the reason: "this build has no CUDA kernels".
std::string why_not(Device device);

// Sets the cudaStream_t of this thread's later calls; null: the default stream. `ingest`, `gram`, `inner` and `apply`
// wait for the stream, because they return a computed result. `decode` waits only for the heads of rows that have one;
// `encode` does not wait.
void use_stream(void* stream);

// Chooses the instruction set for all later calls of this process. The initial choice is that of the environment
// variable AFFLUX_ISA, else the best one that runs. Throws Unavailable for a name that is unknown, not compiled, or
// does not run here.
void choose_isa(const std::string& name);

}  // namespace afflux
