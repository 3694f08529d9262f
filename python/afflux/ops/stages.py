"""One server round as data: the stages combine, calibrate and step, and the `Pass` that `apply` executes.

Every vector is flat and contiguous, or in `Parts`; float64 is used inside. The stages are msgspec structs, which C code
constructs: several are made in every round, and a frozen dataclass takes several times as long.
`msgspec.structs.replace` changes one.
"""

from collections.abc import Sequence
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from afflux.ops.codecs import Codec

Array = object  # anything with the buffer protocol or __dlpack__, or Parts where they are allowed; the engine checks it

Float64 = npt.NDArray[np.float64]


class Noise(Struct, frozen=True, eq=False):
    """sigma * z, the last term of the direction: z ~ N(0, I), each element a function of key, nonce and its index.

    With `next`, next[s] * z is the last term of the new rule vector s. The random bits are those of ChaCha20 (RFC
    8439). Draw a new nonce for each pass with the same key: otherwise the difference of two results has no noise. The
    repr does not have the key.
    """

    sigma: float  #: at least 0
    key: bytes  #: 32 bytes
    nonce: bytes  #: 12 bytes
    first: int = 0  #: the index of element 0 in the whole vector
    next: npt.NDArray[np.float64] | None = None  #: (R,) float64, with `RuleVectors.next`; None: zeros

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("sigma", self.sigma), ("nonce", self.nonce.hex()), ("first", self.first), ("next", self.next)]

    def __repr__(self) -> str:
        return f"Noise({', '.join([f'{name}={value!r}' for name, value in self.__rich_repr__()])})"


class Combine(Struct, frozen=True, eq=False):
    """Stage 1: v = params_weight * params + sum_i weights[i] * updates[i].

    The sum runs in the given order in float64. An update whose weight is 0 is not read.

    With a `trim` greater than 0, the updates' part is W times their weighted trimmed mean instead, W = sum_i
    weights[i], element by element: the M updates that have a weight are sorted by value, a share `trim` of the weights
    is cut at both ends, and the rest is averaged; 0.5 is the mean of lower and upper median. Weights count in units of
    W / 2**28, and a rest below M units counts as cut. What is cut changes no bit.
    """

    updates: Sequence[Array]  #: M vectors (d,), all float32, all float64 or all bfloat16
    weights: Float64  #: (M,) float64
    params_weight: float = 0.0
    #: the largest valid absolute value in the updates that the sweep reads (for the direction, a row or a rule vector),
    #: if they were not checked before; greater than 0; on a GPU only without cached rows and rule vectors
    most: float = inf
    trim: float = 0.0  #: from 0 to 0.5; greater than 0 only without cached rows and negative weights
    noise: Noise | None = None  #: only without cached rows


class RuleVectors(Struct, frozen=True, eq=False):
    """Up to 4 vectors that the server keeps: their terms in stage 1, and their new values, from the same sweep.

    v = params_weight * params + sum_s weights[s] * vectors[s] + sum_i combine.weights[i] * updates[i], in this order.
    Then, with the old values on the right, vectors[s] = sum_t next[s, t] * vectors[t] + sum_i next[s, R+i] *
    updates[i], rounded once. Calibration does not change the updates in this sum. A vector whose coefficient in a
    sum is 0 is not read for that sum. A vector whose row of `next` is 1 at itself and 0 elsewhere is not written, if it
    has no noise.
    """

    vectors: Sequence[Array]  #: R vectors (d,) of the type of params, overwritten
    weights: Float64  #: (R,) float64
    next: Float64 | None = None  #: (R, R+M) float64, C-contiguous; None: the vectors do not change
    #: R vectors that receive the new values, if `next` is given; each is vectors[s] or has other memory. Empty: in
    #: place
    outs: Sequence[Array] = ()


class RowFacts(NamedTuple):
    """The key and the range with which a vector is encoded."""

    key: int = 0  #: the 64-bit key of the random bits; a different one for every row that is ever stored
    low: float = 0.0  #: the least element, for affine(scope="vector")
    high: float = 0.0  #: the largest element


class _Cached(Struct, frozen=True, eq=False):
    """The clients' cached rows and their sum."""

    sum: Array  #: (d,) float64, overwritten
    num_clients: int
    #: M encoded rows: (d,) of the codec's type if it has one, else their bytes as uint8; None: a row of zeros, not read
    rows: Sequence[Array | None]
    new_rows: Sequence[Array | None]  #: M rows, overwritten; None: the row is kept. May be rows[i] itself
    codec: Codec | None = None  #: of all rows; None: float64 where the updates are float64, else float32
    facts: "Sequence[RowFacts]" = ()  #: M, for keyed codecs: the facts with which each new row is encoded
    quantize_direction: bool = False  #: v uses the new row, decoded, in the place of the update
    sum_out: Array | None = None  #: (d,) float64, receives the new sum, and `sum` is only read; None: in place
    factor: float = 1.0  #: of the old rows and their sum in v, from 0 to 1; of a mean 1


class CachedDifference(_Cached, frozen=True, eq=False):
    """Stage 2 of CA2FL (Algorithm 1): v += sum/num_clients + sum_i weights[i] * (updates[i] - rows[i]).

    With a factor (FedStale) sum and rows[i] are multiplied by it in v, and nowhere else. Replaces the weighted sum of
    stage 1; rows[i] is the decoded row. For each i with a new row: new_rows[i] = updates[i] encoded, sum +=
    new_rows[i] - rows[i], both decoded. `sum` is the float64 sum of all clients' rows, kept exact to rounding; `sum`
    (or `sum_out`) and `new_rows` are overwritten.
    """

    kind: ClassVar[str] = "cached_difference"


class CachedMean(_Cached, frozen=True, eq=False):
    """Stage 2 of AFA-CS: first rows and sum as in CachedDifference, then v += sum/num_clients.

    Replaces the weighted sum of stage 1, and ignores its weights. An update without a new row is not read. `sum`
    and `new_rows` are overwritten.
    """

    kind: ClassVar[str] = "cached_mean"


class Step(Struct, frozen=True):
    """Stage 3: the engine's optimizer `kind`, from the direction d to the new params and states.

    `afflux/step.hpp` has the equation of each kind: sgd is out = params + lr * d, assign is out = lr * d (with
    Combine.params_weight, d adds to a running sum), momentum and nesterov keep m, the others m, v and, of amsgrad,
    v_hat.

    All is computed in float64 from the stored states. The step uses the unrounded new states; then each state, and out,
    is rounded once to its type.
    """

    kind: str  #: one of `_engine.STEP_KINDS`, which has its number of states
    lr: float = 1.0
    beta1: float = 0.0  #: 0 <= beta1 < 1, of m
    beta2: float = 0.0  #: 0 <= beta2 < 1, of v; of nesterov, the dampening; adagrad does not use it
    epsilon: float = 0.0  #: greater than 0 if the kind divides
    root_scale: float = 1.0  #: greater than 0, the factor of the root


class Pass(Struct, frozen=True, eq=False):
    """One server round as data. `out` may be `params` itself; other overlaps with written memory are rejected."""

    params: Array  #: (d,) float32 or float64, read
    out: Array  #: (d,) of the same type, overwritten
    combine: Combine
    calibrate: CachedDifference | CachedMean | None = None
    step: Step = Step("sgd")
    states: Sequence[Array] = ()  #: the step's vectors (d,) of the type of params, overwritten
    rule_vectors: RuleVectors | None = None
    #: one vector for each state, which receives its new value; each is states[i] or has other memory. Empty: in place
    states_out: Sequence[Array] = ()
    #: the largest valid absolute value in out, states and rule vectors; greater than 0. It is limited to the largest
    #: finite value of their type. It changes no bit of the results
    most: float = inf


#: CRC-32C of each superblock that a sweep has written, as by `crc32c`: of out, sum, each row (its head first; empty if
#: the row was kept), the step's states, and rule vectors (none if they do not change).
Checksums = tuple[bytes, bytes, list[bytes], list[bytes], list[bytes]]
