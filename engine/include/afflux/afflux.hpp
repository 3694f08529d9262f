// afflux: the arithmetic of one server round of asynchronous federated learning.
//
//   ingest   copy one client's update into a slot; find non-finite values, norm, min and max in the same sweep
//   gram     all inner products of K vectors, in one sweep
//   apply    combine -> calibrate -> step, in one sweep
//   encode   a vector into a cached row, and back: decode
//   backends what was compiled, what runs on this machine, what is chosen
//
// Every result is the same bit for bit on any number of threads and any instruction set (see order.hpp).
// Entry points check everything before they write anything: after an exception nothing has changed.
// They allocate nothing that grows with d, never print, and keep no threads between calls.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "afflux/order.hpp"
#include "afflux/pass.hpp"
#include "afflux/view.hpp"

namespace afflux {

// The caller's arguments do not fit together; the message names the operation and the argument.
struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// What was asked for is not in this build or not on this machine.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Statistics {
  double sum_of_squares;         // of the float32 values written
  float min, max;                // over all values that are not NaN; +inf, -inf when there is none
  std::int64_t first_nonfinite;  // index of the first NaN or infinity in the slot, -1 if all are finite
};

// slot = update, as float32. Moves (sizeof(update) + 4) d bytes. A float64 value beyond float32's range counts as
// non-finite. The slot is written even when values are not finite; whether to use it is the caller's decision.
Statistics ingest(View<const float> update, View<float> slot, int num_threads = 1);
Statistics ingest(View<const double> update, View<float> slot, int num_threads = 1);

// out[i * K + j] = <vectors[i], vectors[j]> in float64, symmetric. One sweep of 4 K d bytes for K <= 64; larger K are
// done in panels of 64. Scratch memory is at most a few MB, whatever d is.
void gram(List<View<const float>> vectors, View<double> out, int num_threads = 1);

void apply(const Pass& pass, int num_threads = 1);

// Bytes of one encoded row of `size` elements.
std::int64_t row_bytes(Codec codec, std::int64_t size);
void encode(Codec codec, View<const float> vector, View<unsigned char> row, int num_threads = 1);
void decode(Codec codec, View<const unsigned char> row, View<float> vector, int num_threads = 1);

struct Backend {
  std::string name;    // "baseline", "avx2", "avx512", "neon" or "cuda"
  std::string device;  // "cpu" or "cuda"
  bool compiled, runs, chosen;
  std::string why_not;  // empty when it runs
};

// Best first.
std::vector<Backend> backends();

// Chooses the instruction set for all later calls of this process. The environment's AFFLUX_ISA is the initial choice,
// else the best that runs. Throws Unavailable for a name that is unknown, not compiled, or does not run here.
void choose_isa(const std::string& name);

}  // namespace afflux
