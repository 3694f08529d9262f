// The table of all operations, which the entry points call. An Executor allocates scratch memory, copies, and runs the
// bodies of kernels: on a device (device.hpp), or in tests on the host (emulated.hpp).
#pragma once
#include "cuda/apply.hpp"
#include "cuda/codec.hpp"
#include "cuda/gram.hpp"
#include "cuda/heads.hpp"
#include "cuda/ingest.hpp"
#include "cuda/inner.hpp"

namespace afflux::cuda {

template <class Executor>
constexpr Backend kBackendOn{Executor::why_not,    ingest<Executor>,     ingest_from_host<Executor>, gram<Executor>,
                             inner<Executor>,      apply<Executor>,      encode<Executor>,           decode<Executor>,
                             read_heads<Executor>, write_heads<Executor>};

}  // namespace afflux::cuda
