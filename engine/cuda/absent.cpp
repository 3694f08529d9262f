// The backend of a build without CUDA: there is none.
#include "api/kernels.hpp"

namespace afflux::cuda {

const Backend* backend() { return nullptr; }

}  // namespace afflux::cuda
