#include "afflux/afflux.hpp"
#include "api/kernels.hpp"

namespace afflux {
namespace {

thread_local void* current_stream = nullptr;

}  // namespace

std::string why_not(Device device) {
  if (device.kind == DeviceKind::cpu) return "";
  return cuda::backend() == nullptr ? "this build has no CUDA kernels" : cuda::backend()->why_not(device.index);
}

void use_stream(void* stream) { current_stream = stream; }

cuda::Where cuda::on(Device device) { return {device.index, current_stream}; }

}  // namespace afflux
