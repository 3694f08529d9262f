"""A contender: one implementation of a row's operation, afflux's own or another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from afflux.arrays.interop import on_host
from afflux.bench.spec.arrays import Vector
from afflux.bench.spec.inputs import Inputs
from afflux.bench.spec.streams import Traffic

#: ours; plain: the papers' formula in torch; best: the fastest torch code; peer: another library; or none of these
Role = Literal["ours", "plain", "best", "peer", ""]
#: Seconds, more than enough for the workers of OpenMP and OpenBLAS, which spin after their work and hold a core.
REST, REST_OF_OPENBLAS = 0.025, 0.06

#: Arrays by name, on the host or on a GPU.
Arrays = dict[str, Vector]


def unprepared(k: int) -> None:
    pass


@dataclass(frozen=True)
class Round:
    """A contender that is ready to run: its state and containers are built."""

    run: Callable[[int], object]  #: one server round on input set k; all that is timed
    before: Callable[[int], Arrays]  #: the inputs of that round, before it runs
    after: Callable[[object], Arrays]  #: its outputs, given the result of `run`
    prepare: Callable[[int], object] = unprepared  #: called before each run, and not timed


def nothing(d: int, m: int) -> int:
    return 0


def vector_bytes(count: Callable[[int], int]) -> Callable[[int, int], int]:
    """The bytes of count(M) float32 vectors, as a function of (d, M)."""
    return lambda d, m: 4 * d * count(m)


def here() -> None:
    return None


@dataclass(frozen=True)
class Contender:
    """One way to do a row's operation."""

    name: str
    what: str
    make: Callable[[Inputs], Round]
    kept: Callable[[int, int], int] = nothing  #: bytes of its own state, of (d, M)
    temporary: Callable[[int, int], int] = nothing  #: bytes that a round allocates and frees
    role: Role = ""
    caveat: str = ""  #: its requirements and omissions in comparison with afflux; for "where we lose"
    traffic: Callable[[int], Traffic] | None = None  #: of M; if it is not the row's: a part of it, or of other data
    rest: float = REST  #: seconds of rest before the next contender's turn
    numpy: bool = False  #: runs on NumPy's arrays, so on the host only
    compiles: bool = False  #: its first run compiles, which takes long; it takes part only with --compile
    absent: Callable[[], str | None] = here  #: the reason why it cannot take part; called only if its row runs


def ends(array: Vector, size: int) -> npt.NDArray[Any]:
    """A copy for NumPy of the first and last `size` of the last axis: enough for errors, tails included."""
    if array.ndim == 0 or array.shape[-1] <= 2 * size:
        return on_host(array, copy=True)
    return np.concatenate([on_host(array[..., :size]), on_host(array[..., -size:])], axis=-1)
