// The backend on a Machine: a device (device.hpp), or the host in its place (emulated.hpp).
#pragma once
#include "cuda/reductions.hpp"
#include "cuda/sweeps.hpp"
#include "cuda/translations.hpp"

namespace afflux::cuda {

template <class Machine>
constexpr Backend kBackendOn{Machine::why_not, ingest<Machine>, gram<Machine>,       apply<Machine>,
                             encode<Machine>,  decode<Machine>, read_heads<Machine>, write_heads<Machine>};

}  // namespace afflux::cuda
