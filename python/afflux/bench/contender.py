"""Who takes part in a row: the vocabulary that rows and baselines share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.bench.inputs import Inputs

Arrays = dict[str, npt.NDArray[Any]]


def unprepared(k: int) -> None:
    pass


@dataclass(frozen=True)
class Round:
    """A contender that is ready to run: its state and containers are built."""

    run: Callable[[int], object]  #: one server round on input set k; all that is timed
    before: Callable[[int], Arrays]  #: what that round is going to read
    after: Callable[[object], Arrays]  #: its outputs, given what `run` returned
    prepare: Callable[[int], object] = unprepared  #: comes before each run, and is not timed


def nothing(d: int, m: int) -> int:
    return 0


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
    plain: bool = False  #: the formula as papers' authors write it; the others are compared with it
    part: Callable[[int, int], int] | None = None  #: bytes, of (d, M), if it does only a part of the row's operation
    compiles: bool = False  #: runs only if asked for, because compiling takes long
    absent: Callable[[], str | None] = here  #: why it cannot take part; asked only if its row runs


def ends(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy of the first and last `size` of the last axis: enough for errors, tails included."""
    if array.ndim == 0 or array.shape[-1] <= 2 * size:
        return array.copy()
    return np.concatenate([array[..., :size], array[..., -size:]], axis=-1)
