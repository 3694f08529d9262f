// The kernels of apply for float32 params.
#include "cuda/apply.hpp"
#include "cuda/device.hpp"

namespace afflux::cuda {

template bool apply_params<DeviceExecutor, float>(DeviceExecutor&, const Pass&, const RowHeads*, const NewHeads&);

}  // namespace afflux::cuda
