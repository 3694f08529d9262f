// The kernels of apply for float64 params.
#include "cuda/apply.hpp"
#include "cuda/device.hpp"

namespace afflux::cuda {

template void sweep_params<DeviceExecutor, double>(DeviceExecutor&, const Sweep&, Type);

}  // namespace afflux::cuda
