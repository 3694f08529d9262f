"""The whole vocabulary of an aggregation rule: facts about a round, and three slots.

    weigh      one float64 weight per buffered arrival
    calibrate  whether per-client cached rows enter the direction
    step       how the direction moves params

Functions in the first and third slot are part of the exact path: they may use + - * / sqrt, comparisons and integer
powers, and nothing whose last bit differs between CPUs (np.exp, np.power, np.dot, @, np.sum; tests/test_exact_path.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from afflux.errors import AffluxError
from afflux.ops import Sgd

ClientId = int | str
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Kind = Literal["update", "gradient", "model"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A full buffer, frozen, in canonical order: by (client_id, version pulled, join number)."""

    version: int  #: the server's version t before this step
    client_ids: tuple[ClientId, ...]
    versions: Int64  #: (M,) the version that each client pulled
    staleness: Int64  #: (M,) version when it joined - version pulled, >= 0
    num_examples: Int64  #: (M,)
    losses: Float64  #: (M,) as reported by the clients; NaN if not
    norms: Float64  #: (M,) Euclidean norms of what was pushed

    def __len__(self) -> int:
        """The number of arrivals M."""
        return len(self.client_ids)


class Weigh(Protocol):
    """(M,) float64 weights; 0 rejects an arrival: its vector is not read, and a cached row stays as it is."""

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """The weights, in the order of the arrivals."""
        ...


@dataclass(frozen=True, slots=True)
class Calibrate:
    """What per-client memory enters the direction. Facts only: the engine does the arithmetic."""

    cached: bool  #: every client's last vector is kept as a row


Step = Callable[[Arrivals], Sgd]


@dataclass(frozen=True, slots=True)
class Rule:
    """An aggregation rule. `kind` is what clients push, and gives the direction its sign.

    update    u_i = local - pulled params:    v = sum w_i u_i
    gradient  G_i = -u_i/(client_lr * steps): v = sum w_i G_i, and the step goes against it
    model     y_i = local params:             v = sum w_i (y_i - params)
    """

    name: str
    kind: Kind
    buffer_size: int  #: M, arrivals per server step
    weigh: Weigh
    calibrate: Calibrate
    step: Step

    def __post_init__(self) -> None:
        if self.kind not in ("update", "gradient", "model"):
            raise AffluxError(f"[Rule] kind is {self.kind!r}, must be update, gradient or model")
        if isinstance(self.buffer_size, bool) or not isinstance(self.buffer_size, int) or self.buffer_size < 1:
            raise AffluxError(f"[Rule] buffer_size is {self.buffer_size!r}, must be an int of at least 1")
        if self.calibrate.cached and self.kind == "model":
            raise AffluxError("[Rule] cached rows calibrate updates or gradients, not models")
