// The kernels' bodies, compiled for the host in the device's place: for tests (AFFLUX_CUDA=emulated).
#include "cuda/emulated.hpp"

#include "cuda/operations.hpp"

namespace afflux::cuda {

const Backend* backend() { return &kBackendOn<HostExecutor>; }

}  // namespace afflux::cuda
