"""A contender: one implementation of a row's operation, by afflux or by another library."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from afflux.arrays.interop import on_host
from bench.spec.arrays import Vector
from bench.spec.inputs import Inputs
from bench.spec.libraries import absent
from bench.spec.streams import Traffic

#: ours: afflux; plain: the papers' formula in torch; best: the fastest torch code; peer: another framework; or empty
Role = Literal["ours", "plain", "best", "peer", ""]
#: Seconds of rest: enough for the workers of OpenMP and OpenBLAS, which spin after their work and occupy a core.
REST, REST_OF_OPENBLAS = 0.025, 0.06

#: Arrays by name, on the host or on a GPU.
Arrays = dict[str, Vector]


@dataclass(frozen=True)
class Round:
    """A prepared contender, with its state and containers."""

    run: Callable[[int], object]  #: makes one server round on input set k; only this is timed
    before: Callable[[int], Arrays] = lambda k: {}  #: returns the inputs of that round, before it runs
    after: Callable[[Any], Arrays] = lambda result: {}  #: returns the outputs, from the result of `run`
    prepare: Callable[[int], object] = lambda k: None  #: called before each run, and not timed


#: a number of float32 vectors (d,), or its function of M
Vectors = float | Callable[[int], float]


def count(vectors: Vectors, m: int) -> float:
    return vectors(m) if callable(vectors) else vectors


@dataclass(frozen=True)
class Contender:
    """One way to do a row's operation."""

    name: str
    what: str
    make: Callable[[Inputs], Round]
    kept: Vectors = 0  #: its own state
    temporary: Vectors = 0  #: what a round allocates and frees
    caveat: str = ""  #: its requirements and omissions in comparison with afflux; for "where we lose"
    role: Role = ""
    modules: tuple[str, ...] = ()  #: modules of other libraries; imported only if its row runs
    traffic: Callable[[int], Traffic] | None = None  #: of M, if its streams are not the row's
    rest: float = REST  #: seconds of rest before the next contender's turn
    numpy: bool = False  #: runs on NumPy arrays, so only on the host
    compiles: bool = False  #: its first run compiles for a long time, so it runs only with --compile
    requirement: Callable[[], str | None] = lambda: None  #: returns another reason why it cannot run here

    def kept_bytes(self, d: int, m: int) -> int:
        return int(4 * d * count(self.kept, m))

    def temporary_bytes(self, d: int, m: int) -> int:
        return int(4 * d * count(self.temporary, m))

    def absent(self) -> str | None:
        """Return the reason why it cannot run here; None if it can."""
        return absent(*self.modules) or self.requirement()


TORCH = ("torch",)
ours = partial(Contender, role="ours")
plain, best = (partial(Contender, role=role, modules=TORCH) for role in ("plain", "best"))
peer = partial(Contender, role="peer")
#: another contender of torch
extra = partial(Contender, modules=TORCH)


def compiled(
    what: str,
    make: Callable[[Inputs], Round],
    kept: Vectors = 0,
    temporary: Vectors = 0,
    caveat: str = "float32 sums",
    name: str = "torch.compile",
) -> Contender:
    """Return the contender of torch's compiler."""
    return best(name, what, make, kept, temporary, f"{caveat}; compiles for each M", compiles=True)


def ends(array: Vector, size: int) -> npt.NDArray[Any]:
    """Return a NumPy copy of the first and last `size` elements of the last axis, enough to compute errors."""
    if array.ndim == 0 or array.shape[-1] <= 2 * size:
        return on_host(array, copy=True)
    return np.concatenate([on_host(array[..., :size]), on_host(array[..., -size:])], axis=-1)
