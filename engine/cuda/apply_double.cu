// The kernels of apply for double params.
#include "cuda/device.hpp"
#include "cuda/sweeps.hpp"

namespace afflux::cuda {

template void sweep_params<DeviceMachine, double>(DeviceMachine&, const Sweep&, Type);

}  // namespace afflux::cuda
