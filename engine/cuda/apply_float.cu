// The kernels of apply for float32 params.
#include "cuda/apply.hpp"
#include "cuda/device.hpp"

namespace afflux::cuda {

template void sweep_params<DeviceExecutor, float>(DeviceExecutor&, const Sweep&, Type);

}  // namespace afflux::cuda
