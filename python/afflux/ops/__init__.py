"""The engine's operations over arrays of any library: NumPy, torch, CuPy, JAX (buffer protocol or DLPack).

Nothing is copied: the engine works on the caller's memory. Every vector is flat and contiguous, and float32, float64 or
bfloat16 (from torch or JAX, or an `_engine.Buffer`: NumPy has none); float64 is used inside. Results are the same bit
for bit on any number of threads and any instruction set.

`gram`, `inner` and `apply` also take vectors in `Parts`: the arrays of a model, with the borders at which a flat vector
would be cut. All vectors of a call that are in parts have the same borders; results are those of flat vectors.
Params, states, rule vectors and all that is written have one dtype. Updates, and the vectors of `gram` and `inner`, may
have parts of any dtypes and a `Conversion`: they are what `ingest` would write. Cached rows and their sum are flat. On
a GPU, `ingest` the parts first.

All vectors of a call are on one device, the CPU or a GPU (torch, CuPy), and the call runs on this device. On a GPU it
uses the current stream of the library of the first vector. A call that returns a result waits for this stream. Weights,
coefficients and the products of `gram` are on the CPU.
"""

from afflux._engine import Parts
from afflux.ops.backends import (
    Backend,
    backends,
    choose_isa,
    choose_policy,
    default_threads,
    policy,
    processor_family,
    threads,
)
from afflux.ops.operations import (
    Conversion,
    Ingested,
    InnerProducts,
    Kind,
    apply,
    check,
    crc32c,
    decode,
    encode,
    gram,
    ingest,
    inner,
    row_bytes,
)
from afflux.ops.stages import (
    Array,
    CachedDifference,
    CachedMean,
    Checksums,
    Combine,
    Float64,
    Noise,
    Pass,
    RowFacts,
    RuleVectors,
    Step,
)

__all__ = [
    "Array",
    "Backend",
    "CachedDifference",
    "CachedMean",
    "Checksums",
    "Combine",
    "Conversion",
    "Float64",
    "Ingested",
    "InnerProducts",
    "Kind",
    "Noise",
    "Parts",
    "Pass",
    "RowFacts",
    "RuleVectors",
    "Step",
    "apply",
    "backends",
    "check",
    "choose_isa",
    "choose_policy",
    "crc32c",
    "decode",
    "default_threads",
    "encode",
    "gram",
    "ingest",
    "inner",
    "policy",
    "processor_family",
    "row_bytes",
    "threads",
]
