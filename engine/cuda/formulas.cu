// Holds the seam for the CUDA backend open: every formula the CPU uses compiles for the device, with flags that give
// the CPU's bits. The drivers (ingest, gram, apply, encode, decode) come with the CUDA backend.
#include "formula/calibrate.hpp"
#include "formula/codec.hpp"
#include "formula/combine.hpp"
#include "formula/reduce.hpp"
#include "formula/step.hpp"

namespace afflux::cuda {

// One element of a CA2FL round for one arrival.
__global__ void every_formula(float* params, double* sum, float* row, const float* update, double weight, double lr,
                              double inverse_num_clients, double* lanes, float* extremes) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const double pushed = update[i], start = params[i];
  const double diff = formula::difference<double>(pushed, formula::decode_float32(row[i]));
  double v = formula::weighted(0.0, weight, start);
  v = formula::add_cached_mean(v, sum[i], inverse_num_clients);
  v = formula::weighted(v, weight, diff);
  sum[i] = formula::add_to_sum(sum[i], diff);
  row[i] = formula::encode_float32(update[i]);
  params[i] = static_cast<float>(formula::sgd(start, v, lr));
  lanes[i] = formula::dot_term(lanes[i], update[i], update[i]);
  extremes[0] = formula::lesser(extremes[0], update[i]);
  extremes[1] = formula::greater(extremes[1], update[i]);
  if (i == 0 && formula::finite(diff)) lanes[0] = formula::lane_sum(lanes, 32);
}

}  // namespace afflux::cuda
