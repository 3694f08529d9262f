// A build without CUDA.
#include "api/kernels.hpp"

namespace afflux::cuda {

const Backend* backend() { return nullptr; }

}  // namespace afflux::cuda
