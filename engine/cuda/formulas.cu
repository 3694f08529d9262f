// Holds the seam for the CUDA backend open: every formula the CPU uses compiles for the device, with flags that give
// the CPU's bits. The drivers (ingest, gram, apply, encode, decode) come with the CUDA backend.
#include "formula/calibrate.hpp"
#include "formula/codec.hpp"
#include "formula/combine.hpp"
#include "formula/elementary.hpp"
#include "formula/half.hpp"
#include "formula/random.hpp"
#include "formula/reduce.hpp"
#include "formula/step.hpp"

namespace afflux::cuda {

// One element of a CA2FL round for one arrival that comes as float16 and is kept as bfloat16.
__global__ void every_formula(float* params, double* sum, float* row, const Float16* pushed, Bfloat16* slot,
                              double weight, double lr, double inverse_num_clients, double* lanes, float* extremes) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  formula::narrow(formula::widened(pushed[i]), slot + i);
  const float kept = formula::widened(slot[i]);
  const double update = kept, start = params[i];
  const double diff = formula::difference<double>(update, row[i]);
  double v = formula::weighted(0.0, weight, start);
  v = formula::add_cached_mean(v, sum[i], inverse_num_clients);
  v = formula::weighted(v, weight, diff);
  sum[i] = formula::add_to_sum(sum[i], diff);
  formula::narrow(kept, row + i);
  formula::narrow(formula::sgd(start, formula::heavy_ball(start, v, lr), lr), params + i);
  double square = formula::moving_square(start, v, lr, 1.0 - lr);
  square = formula::yogi_square(formula::sum_of_squares(square, v), v, lr);
  const double mean = formula::moving_mean(start, v, lr, 1.0 - lr);
  formula::narrow(formula::adaptive(start, mean, sqrt(square), lr, weight, lr), params + i);
  lanes[i] = formula::pow(formula::exp(lanes[i]), formula::log(square));
  lanes[i] = formula::dot_term<float>(lanes[i], update, update);
  lanes[i] = formula::dot_term<float, double>(lanes[i], kept, diff);
  extremes[0] = formula::lesser(extremes[0], kept);
  extremes[1] = formula::greater(extremes[1], kept);
  if (i == 0 && formula::finite(diff)) lanes[0] = formula::lane_sum(lanes, 32);
}

}  // namespace afflux::cuda
