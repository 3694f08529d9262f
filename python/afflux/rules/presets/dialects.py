"""The variants of FedBuff in other frameworks; docs/reference/dialects.md compares them, with numbers.

u: a client's update; y: the client's own model; x: params when the buffer is applied; t: staleness; s: the function
of staleness; M: arrivals. If a formula has y, the rule's kind is `model`: clients push y.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np

from afflux.ops.errors import AffluxError
from afflux.ops.validation import check_fields, flag, integer
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Float64, Kind, Weigh
from afflux.rules.staleness import Constant, Polynomial, StalenessLaw, a_law
from afflux.rules.weights import Staleness

DialectName = Literal["paper", "flsim", "appfl", "nvflare", "fedscale", "plato", "federatedscope", "afl-lib", "flgo"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A variant of FedBuff: the kind of vector that clients push, the function of staleness, and the weights."""

    #: Makes the weights from the law and the buffer size; None: the paper's weights, where `normalise` can be chosen.
    part: Callable[[StalenessLaw, int], Weigh] | None = None
    kind: Kind = "update"
    law: StalenessLaw = Polynomial(0.5)  # noqa: RUF009 - frozen; the law if the user names none
    law_is_fixed: bool = False  #: the framework has no other law


def paper() -> Dialect:
    """Return the dialect 1/M sum s(t) u (Nguyen et al., Algorithm 1).

    FLGo 0.4.4, fedbuff.Server.package_handler, computes the same.
    """
    return Dialect()


def flsim(*, avg_staleness: int = 1) -> Dialect:
    """Return the dialect sum s(t) / s(avg_staleness) u: not a mean.

    FLSim 085aa75, HybridAggregator and StalenessWeight.weight.
    """
    average = integer(0)("flsim", "avg_staleness", avg_staleness)

    def part(law: StalenessLaw, size: int) -> Weigh:
        if not (factor := law(average)) > 0:
            raise AffluxError(f"[flsim] the law {law} gives {factor} at avg_staleness {average}, must be positive")
        return Staleness(law, None, 1.0 / factor)

    return Dialect(part)


def appfl(*, num_clients: int = 1) -> Dialect:
    """Return the dialect 1/N sum s(t) (y - x), N all clients.

    APPFL 1.12.0, FedBuffAggregator.compute_steps.
    """
    count = integer(1)("appfl", "num_clients", num_clients)
    return Dialect(lambda law, size: Staleness(law, None, 1.0 / count), "model")


def nvflare(*, per_version: bool = False) -> Dialect:
    """Return the dialect 1/M sum s(t) u, s = 1 / (1 + sqrt(1 + t)).

    NVFlare 2.9.0, BuffModelManager(staleness_weight=True). With `per_version`: the sum over versions of the mean over
    the arrivals from that version, as in NVFlare 2.7.0 to 2.8.0.
    """
    by_version = flag("nvflare", "per_version", per_version)
    return Dialect(lambda law, size: VersionMeans(law) if by_version else Staleness(law), law=OnePlusRoot())


def fedscale() -> Dialect:
    """Return the dialect sum s(t) y / sum s(t), a mean of models.

    FedScale 8bc8940, AsyncAggregator.update_weight_aggregation.
    """
    return Dialect(lambda law, size: Staleness(law, "weights"), "model", law_is_fixed=True)


def plato() -> Dialect:
    """Return the dialect 1/M sum (y - x), s = 1.

    Plato 143d73b, FedBuffAggregationStrategy.aggregate_deltas.
    """
    return Dialect(lambda law, size: Staleness(law), "model", Constant(), law_is_fixed=True)


def federatedscope() -> Dialect:
    """Return the dialect sum s(t) n_i u / sum n_i, s = 1 / (1 + t).

    FederatedScope 7c18f77, AsynClientsAvgAggregator.
    """
    return Dialect(lambda law, size: Staleness(law, by_examples=True), law=Polynomial(1))


def afl_lib() -> Dialect:
    """Return the dialect 1/M^2 sum u, s = 1: the mean is divided by M again.

    AFL-Lib 7e6043b, alg/fedbuff.py, Server.aggregate.
    """
    return Dialect(lambda law, size: Staleness(law, scale=1.0 / size), law=Constant(), law_is_fixed=True)


DIALECTS: dict[str, Callable[[], Dialect]] = {
    "paper": paper,
    "flsim": flsim,
    "appfl": appfl,
    "nvflare": nvflare,
    "fedscale": fedscale,
    "plato": plato,
    "federatedscope": federatedscope,
    "afl-lib": afl_lib,
    "flgo": paper,
}


@register("one_plus_root", "staleness")
@dataclass(frozen=True, slots=True)
class OnePlusRoot:
    """s = 1 / (1 + sqrt(1 + staleness)): 1/2 for a fresh arrival."""

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0 / (1.0 + sqrt(1.0 + staleness))


@register("version_means", "weigh")
@dataclass(frozen=True, slots=True)
class VersionMeans:
    """w_i = s(staleness_i) / (number of arrivals of the buffer from the same version)."""

    law: StalenessLaw

    def __post_init__(self) -> None:
        check_fields(self, a_law, "law")

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        pulled = arrivals.versions.tolist()
        return np.array([self.law(int(t)) / pulled.count(v) for t, v in zip(arrivals.staleness, pulled, strict=True)])
