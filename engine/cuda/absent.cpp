// A build without CUDA.
#include "cuda/backend.hpp"

namespace afflux::cuda {

const Backend* backend() { return nullptr; }

}  // namespace afflux::cuda
