// The backend on the device, but for the kernels of apply, which take longest to compile (apply_*.cu).
#include "cuda/device.hpp"
#include "cuda/operations.hpp"

namespace afflux::cuda {

extern template void sweep_params<DeviceMachine, float>(DeviceMachine&, const Sweep&, Type);
extern template void sweep_params<DeviceMachine, double>(DeviceMachine&, const Sweep&, Type);

const Backend* backend() { return &kBackendOn<DeviceMachine>; }

}  // namespace afflux::cuda
