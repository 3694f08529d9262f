"""What a server answers: the versions it hands out, what became of a push, what a step did, and the log of it all."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum, nan
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from afflux.rules.rule import ClientId, Float64, Int64, Scalars

#: (d,) float32, or float64 if the server was asked for it: NumPy's; of a server on a GPU torch's or CuPy's, on it.
Params = Any

#: What became of a push. The first six are decided at its join, and are in the log.
#:
#:     joined       it is in the buffer, or in the round of `report`
#:     replaced     likewise, in the place of an earlier arrival of the same client (duplicates="latest")
#:     superseded   the buffer holds an arrival of this client from a newer version (duplicates="latest")
#:     rejected     the buffer holds an arrival of this client (duplicates="reject")
#:     dropped      older than max_staleness
#:     deferred     it waits for the next pass over all clients (gradient scheduling); if it is too old by then, it is
#:                  dropped, and counts as such
#:     empty        the client has trained on no examples (num_examples=0)
#:     expired      its task is closed, or the base that its conversion needs is no longer held
#:     faulty       something is wrong with what the client sent (faults="record"); see Receipt.reason
Decision = Literal["joined", "replaced", "superseded", "rejected", "dropped", "deferred"]
Status = Literal[Decision, "empty", "expired", "faulty"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True, eq=False)
class Pulled:
    """One version of the model. The arrays are read-only and never change, however long they are held.

    NumPy refuses to write to them, torch and CuPy do not: torch.from_numpy(params), and the tensor that a server on a
    GPU gives, share the server's own memory. Train in a copy: pull(out=...), Layout.load or torch.tensor(params).
    """

    params: Params  #: (d,)
    version: int
    buffers: Float64 | None = None  #: the model's non-parameter arrays (BatchNorm statistics), flat; None: it has none


class Report(Struct, frozen=True, eq=False):
    """One server step: what went in and with which weight."""

    version: int  #: the server's version after it
    client_ids: tuple[ClientId, ...]
    joins: Int64  #: (M,) the numbers of their joins: Receipt.join, and Join.number of the log
    versions: Int64  #: (M,) that they pulled
    staleness: Int64  #: (M,)
    weights: Float64  #: (M,) in the direction
    norms: Float64  #: (M,); NaN for vectors that were pushed with copy=False
    cosines: Float64 | None  #: (M,) with the rule's estimate; None if it has none
    rejected: tuple[str, ...]  #: (M,) why the rule rejected an arrival; empty: it did not
    server_lr: float  #: of this round; bias correction, if any, included
    scalars: Scalars  #: the rule's own numbers after the round, such as WKAFL's stage
    stepped: bool  #: False: the rule rejected all, and the version stays
    seconds: float  #: weigh and apply
    nbytes: int  #: of the vectors that went in: M d times the bytes of an element of a slot

    def metrics(self) -> dict[str, float]:
        """The report as flat numbers, for a logger of metrics.

        Returns:
            Plain floats. All reports of a server have the same keys::

            version               the server's version after the step
            stepped               1.0; 0.0 if the rule rejected all, so that the version stays
            arrivals              M
            rejected              how many of these the rule rejected
            staleness_mean, _max  over the arrivals
            weight_min, _max      likewise
            effective_arrivals    (sum w)^2 / sum w^2: M if all weights are equal, 1 if one of them outweighs all
                                  others, 0 if all are 0
            norm_mean, _max       of the vectors whose norm is known; NaN if there are none
            server_lr             of this round
            seconds               of weigh and apply
            bytes                 `nbytes`
            rule/NAME             each of the rule's own numbers, such as rule/stage of WKAFL

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server = Server(rules.fedbuff(buffer_size=2), np.zeros(2, np.float32))
        >>> for client, update in enumerate(([3.0, 4.0], [0.0, 1.0])):
        ...     receipt = server.push(client=client, version=0, update=np.array(update))
        >>> metrics = receipt.report.metrics()
        >>> metrics["version"], metrics["effective_arrivals"], metrics["norm_mean"], metrics["bytes"]
        (1.0, 2.0, 3.0, 16.0)
        """
        count, weights = len(self.client_ids), self.weights.tolist()
        staleness = self.staleness.tolist()
        norms = [norm for norm in self.norms.tolist() if norm == norm]
        return {
            "version": float(self.version),
            "stepped": float(self.stepped),
            "arrivals": float(count),
            "rejected": float(sum(why != "" for why in self.rejected)),
            "staleness_mean": sum(staleness) / count,
            "staleness_max": float(max(staleness)),
            "weight_min": min(weights),
            "weight_max": max(weights),
            "effective_arrivals": _effective_number(weights),
            "norm_mean": _mean(norms),
            "norm_max": max(norms, default=nan),
            "server_lr": self.server_lr,
            "seconds": self.seconds,
            "bytes": float(self.nbytes),
        } | {f"rule/{name}": float(value) for name, value in self.scalars.items()}


def _effective_number(weights: list[float]) -> float:
    """(sum w)^2 / sum w^2, of weights divided by the largest one, so that no square overflows."""
    largest = max(map(abs, weights))
    if largest == 0:
        return 0.0
    shares = [weight / largest for weight in weights]
    return fsum(shares) ** 2 / fsum(share * share for share in shares)


def _mean(values: list[float]) -> float:
    """NaN of no values. Each is divided first: a sum of large ones might overflow."""
    return fsum(value / len(values) for value in values) if values else nan


class Receipt(NamedTuple):
    """What became of a push."""

    status: Status
    #: server steps between the version that the client pulled and the step it would join, less one; None if that
    #: version is unknown
    staleness: int | None
    version: int  #: the server's version after this push
    join: int | None  #: the number of this decision, from 0: its place in the log; None for those that are not in it
    step: int | None  #: the version that its step makes, unless the rule skips it; None if it is in no buffer
    report: Report | None  #: not None if this push completed a round
    more: tuple[Report, ...] = ()  #: of rounds that were full as soon as their pass began (gradient scheduling)
    durable: int | None = None  #: the version that makes this decision safe, at the latest; None without a store, or
    #: where only checkpoint() and close() commit
    reason: str = ""  #: of an expired or faulty push


@dataclass(frozen=True, slots=True)
class Fault:
    """A push that was kept out because of what the client sent. The vector itself is not kept."""

    client_id: ClientId | None  #: None: it is no id
    version: int | None  #: that the client says it has pulled; None: it says nothing that is a number
    reason: str  #: the message of the error that faults="raise" would have raised


class Join(NamedTuple):
    """One push, and what was decided about it."""

    number: int  #: Receipt.join
    status: Decision
    client_id: ClientId
    version: int  #: that the client pulled
    staleness: int
    num_examples: int
    loss: float  #: NaN if unknown
    lent: bool = False  #: pushed with copy=False


@dataclass(frozen=True, slots=True)
class Handed:
    """A memory of the rule was replaced by `Server.set_rule_vector`. The vector itself is not kept."""

    name: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The buffer was emptied before it was full: by `flush` (a step with what was there) or by `discard`."""

    kind: Literal["flush", "discard"]


@dataclass(frozen=True, slots=True)
class Replaced:
    """The rule was replaced by `Server.replace_rule`, at once if the buffer was empty, else once it is."""

    config: Mapping[str, Any]  #: the new rule, as `Rule.to_config` gives it


@dataclass(frozen=True, slots=True)
class Opened:
    """A client has checked a version out (`Server.checkout`)."""

    task: str  #: its id
    client_id: ClientId
    version: int
    hold: bool  #: whether the version's params are held for it
    until: float | None  #: Unix time at which it is closed; None: no limit


@dataclass(frozen=True, slots=True)
class Closed:
    """A task was closed: by a push, by the end of its lease, or by `Task.cancel`."""

    task: str  #: its id
    why: Literal["pushed", "expired", "cancelled"]


Entry = Join | Cut | Handed | Replaced | Opened | Closed


def no_counts() -> dict[str, int]:
    """How many pushes ended in each way; `refused` counts those that raised."""
    return dict.fromkeys((*STATUSES, "refused"), 0)
