// The backend on the device, without the kernels of apply, which take longest to compile (apply_*.cu).
#include "cuda/device.hpp"
#include "cuda/operations.hpp"

namespace afflux::cuda {

extern template void sweep_params<DeviceExecutor, float>(DeviceExecutor&, const Sweep&, Type);
extern template void sweep_params<DeviceExecutor, double>(DeviceExecutor&, const Sweep&, Type);

const Backend* backend() { return &kBackendOn<DeviceExecutor>; }

}  // namespace afflux::cuda
