// The kernels of apply for double params.
#include "cuda/apply.hpp"
#include "cuda/device.hpp"

namespace afflux::cuda {

template void sweep_params<DeviceExecutor, double>(DeviceExecutor&, const Sweep&, Type);

}  // namespace afflux::cuda
