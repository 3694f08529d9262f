// The kernels of apply for float params.
#include "cuda/device.hpp"
#include "cuda/sweeps.hpp"

namespace afflux::cuda {

template void sweep_params<DeviceMachine, float>(DeviceMachine&, const Sweep&, Type);

}  // namespace afflux::cuda
