// The bodies of the kernels, compiled for the host instead of the device, for tests (AFFLUX_CUDA=emulated).
#include "cuda/emulated.hpp"

#include "cuda/operations.hpp"

namespace afflux::cuda {

const Backend* backend() { return &kBackendOn<HostExecutor>; }

}  // namespace afflux::cuda
