"""A contender: one implementation of a row's operation, by afflux or by another library."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from afflux.arrays.interop import on_host
from bench.spec.arrays import Vector
from bench.spec.inputs import Inputs
from bench.spec.streams import Traffic

#: ours: afflux; plain: the papers' formula in torch; best: the fastest torch code; peer: another framework; or empty
Role = Literal["ours", "plain", "best", "peer", ""]
#: Seconds of rest: enough for the workers of OpenMP and OpenBLAS, which spin after their work and occupy a core.
REST, REST_OF_OPENBLAS = 0.025, 0.06

#: Arrays by name, on the host or on a GPU.
Arrays = dict[str, Vector]


def unprepared(k: int) -> None:
    pass


@dataclass(frozen=True)
class Round:
    """A prepared contender, with its state and containers."""

    run: Callable[[int], object]  #: makes one server round on input set k; only this is timed
    before: Callable[[int], Arrays]  #: returns the inputs of that round, before it runs
    after: Callable[[object], Arrays]  #: returns the outputs, from the result of `run`
    prepare: Callable[[int], object] = unprepared  #: called before each run, and not timed


def nothing(d: int, m: int) -> int:
    return 0


def vector_bytes(count: Callable[[int], int]) -> Callable[[int, int], int]:
    """Return a function of (d, M): the bytes of count(M) float32 vectors."""
    return lambda d, m: 4 * d * count(m)


def here() -> None:
    return None


@dataclass(frozen=True)
class Contender:
    """One way to do a row's operation."""

    name: str
    what: str
    make: Callable[[Inputs], Round]
    kept: Callable[[int, int], int] = nothing  #: bytes of its own state, a function of (d, M)
    temporary: Callable[[int, int], int] = nothing  #: bytes that a round allocates and frees
    role: Role = ""
    caveat: str = ""  #: its requirements and omissions in comparison with afflux; for "where we lose"
    traffic: Callable[[int], Traffic] | None = None  #: of M, if its streams are not the row's
    rest: float = REST  #: seconds of rest before the next contender's turn
    numpy: bool = False  #: runs on NumPy arrays, so only on the host
    compiles: bool = False  #: its first run compiles for a long time, so it runs only with --compile
    absent: Callable[[], str | None] = here  #: returns the reason why it cannot run here; called only if its row runs


def ends(array: Vector, size: int) -> npt.NDArray[Any]:
    """Return a NumPy copy of the first and last `size` elements of the last axis, enough to compute errors."""
    if array.ndim == 0 or array.shape[-1] <= 2 * size:
        return on_host(array, copy=True)
    return np.concatenate([on_host(array[..., :size]), on_host(array[..., -size:])], axis=-1)
