// The backend on the device, without the kernels of apply, which take longest to compile (apply_*.cu).
#include "cuda/device.hpp"
#include "cuda/operations.hpp"

namespace afflux::cuda {

extern template bool apply_params<DeviceExecutor, float>(DeviceExecutor&, const Pass&, const RowHeads*,
                                                         const NewHeads&);
extern template bool apply_params<DeviceExecutor, double>(DeviceExecutor&, const Pass&, const RowHeads*,
                                                          const NewHeads&);

const Backend* backend() { return &kBackendOn<DeviceExecutor>; }

}  // namespace afflux::cuda
