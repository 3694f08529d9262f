// A build without CUDA.
#include "cuda/cuda.hpp"

namespace afflux::cuda {

const Backend* backend() { return nullptr; }

}  // namespace afflux::cuda
