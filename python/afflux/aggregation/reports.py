"""The results of a server's calls: versions, receipts of pushes, reports of steps, and the entries of the log."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum, nan
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from afflux.rules.rule import ClientId, Facts, Float64, Int64, Scalars

#: (d,) float32, or float64 with dtype="float64": a NumPy array; of a server on a GPU, torch's or CuPy's array on the
#: GPU.
Params = Any

#: The outcome of a push. The first five are decided at its join, and are in the log.
#:
#:     joined       it is in the buffer, or in the round of `report`
#:     replaced     as joined, and it has replaced an earlier arrival of the same client (duplicates="latest")
#:     superseded   the buffer holds an arrival of this client from a newer version (duplicates="latest")
#:     rejected     the buffer holds an arrival of this client (duplicates="reject"), or the client has entered in this
#:                  pass over all clients (gradient scheduling), or was in as many rounds as the rule allows
#:     dropped      older than max_staleness
#:     empty        the client has trained on no examples (num_examples=0)
#:     expired      its task is closed, or the base that its conversion needs is no longer held
#:     faulty       an argument from the client is invalid (faults="record"); see Receipt.reason
JoinStatus = Literal["joined", "replaced", "superseded", "rejected", "dropped"]
Status = Literal[JoinStatus, "empty", "expired", "faulty"]
DECISIONS: tuple[JoinStatus, ...] = get_args(JoinStatus)
STATUSES: tuple[Status, ...] = get_args(Status)


class Pulled(Struct, frozen=True, eq=False):
    """One version of the model. The arrays are read-only and never change, however long a caller keeps them.

    NumPy raises an error if they are written, but torch and CuPy do not: torch.from_numpy(params), and the tensor of a
    server on a GPU, share the server's own memory. Train in a copy: pull(out=...), Layout.load or torch.tensor(params).
    """

    params: Params  #: (d,)
    version: int
    #: the model's buffers, flat: statistics, such as those of BatchNorm, then the 32-bit words of copied arrays; None:
    #: the model has none
    buffers: Float64 | None = None


class Report(Struct, frozen=True, eq=False):
    """The report of one server step: its arrivals and their weights."""

    version: int  #: the server's version after the step
    client_ids: tuple[ClientId, ...]
    joins: Int64  #: (M,) the numbers of their joins: Receipt.join, and Join.number of the log
    versions: Int64  #: (M,) the versions that the clients pulled
    staleness: Int64  #: (M,)
    weights: Float64  #: (M,) the weights in the direction
    norms: Float64  #: (M,); NaN for vectors that a step has read in place
    #: (M,) cosines with the rule's estimate, NaN for an arrival that it did not weigh; None if the rule has none
    cosines: Float64 | None
    rejected: tuple[str, ...]  #: (M,) the reason why the rule or the server rejected an arrival; empty if accepted
    server_lr: float  #: the learning rate of this round, bias correction included
    scalars: Scalars  #: the rule's own numbers after the round, such as WKAFL's stage
    #: False: no step was taken, and the version did not change. The rule has skipped it, or no arrival had a usable
    #: weight. With weights that are all 0 the server takes a step
    stepped: bool
    seconds: float  #: duration of weigh and apply
    nbytes: int  #: bytes of the round's vectors: M d times the bytes of an element of a slot
    #: (M,) the factors, at most 1, by which `clip_norms` has multiplied the weights; None without clip_norms
    clips: Float64 | None = None

    @property
    def clipped(self) -> tuple[ClientId, ...]:
        """The clients whose vectors `clip_norms` has scaled down, in the order of `client_ids`."""
        clips = [] if self.clips is None else self.clips.tolist()
        return tuple([client_id for client_id, clip in zip(self.client_ids, clips, strict=False) if clip < 1.0])

    def metrics(self) -> dict[str, float]:
        """Return the report as a flat dict of numbers, for a logger of metrics.

        Returns:
            Plain floats. All reports of a server have the same keys::

            version               the server's version after the step
            stepped               1.0; 0.0 if the server took no step, so that the version stays
            arrivals              M
            rejected              how many of these the rule rejected
            clipped               how many of these clip_norms has scaled down
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
            "clipped": float(len(self.clipped)),
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
    """Return (sum w)^2 / sum w^2. The weights are divided by the largest magnitude first: no square overflows."""
    largest = max(map(abs, weights))
    if largest == 0:
        return 0.0
    shares = [weight / largest for weight in weights]
    return fsum(shares) ** 2 / fsum(share * share for share in shares)


def _mean(values: list[float]) -> float:
    """Return the mean; NaN of no values. Each value is divided first: a sum of large values might overflow."""
    return fsum(value / len(values) for value in values) if values else nan


class Receipt(NamedTuple):
    """The result of a push.

    Attributes:
        status: joined, replaced, superseded, rejected, dropped, empty, expired or faulty; see docs/reference/server.md.
        staleness: the number of steps that the server has decided since the version that the client pulled; None if
            that version is unknown.
        version: the server's version after this push.
        join: the number of this decision, from 0: its index in the log; None if it is not in the log.
        step: the version that the arrival's step makes, unless the rule skips it; None if in no buffer.
        report: the round, if this push completed one; else None.
        durable: the version whose commit contains this decision at the latest; None without a store, or if only
            checkpoint() and close() commit.
        reason: the reason of an expired, empty or faulty push, or that its client has entered in this pass, or was in
            as many rounds as the rule allows; else "".
    """

    status: Status
    staleness: int | None
    version: int
    join: int | None
    step: int | None
    report: Report | None
    durable: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """A push that was rejected because an argument from the client is invalid. The vector itself is not kept."""

    client_id: ClientId | None  #: None: the argument is not an id
    version: int | None  #: the version of the push; None: the argument is not a number
    reason: str  #: the message of the error that faults="raise" would have raised


class Join(NamedTuple):
    """One push, and the decision about it."""

    number: int  #: Receipt.join
    status: JoinStatus
    client_id: ClientId
    version: int  #: the version that the client pulled
    staleness: int
    num_examples: int
    loss: float  #: NaN if unknown
    local_steps: int = 0  #: 0 if not reported
    facts: Facts = ()  #: names and values, sorted by name


@dataclass(frozen=True, slots=True)
class Handed:
    """The replacement of a rule vector by `Server.set_rule_vector`. The vector itself is not kept."""

    name: str


@dataclass(frozen=True, slots=True)
class NewParams:
    """A version that `Server.set_params` has made. Params themselves are not kept."""


class Cut(Struct, frozen=True):
    """The emptying of a buffer: by `flush` or `Server.step` (a step with its arrivals), `discard`, or `end_pass`."""

    kind: Literal["flush", "discard", "end_pass"]
    #: the number of the last joins before it that belong to the same `Server.step`, if they filled the buffer; else 0
    joins: int = 0


class NoiseNonce(Struct, frozen=True):
    """The nonce of a round's noise. The next entry completes the round."""

    nonce: str  #: 24 hexadecimal digits


@dataclass(frozen=True, slots=True)
class Replaced:
    """The replacement of the rule by `Server.replace_rule`: at once, or when a buffer with arrivals is emptied."""

    config: Mapping[str, Any]  #: the new rule, as `Rule.to_config` gives it


@dataclass(frozen=True, slots=True)
class Opened:
    """The checkout of a version by a client (`Server.checkout`)."""

    task: str  #: its id
    client_id: ClientId
    version: int
    hold: bool  #: whether the version's params are held for the task
    until: float | None  #: Unix time at which the task is closed; None: no limit
    lease: float | None  #: seconds from its opening until then


class Closed(NamedTuple):
    """The end of a task: by a push, by the end of its lease, or by `Task.cancel`."""

    task: str  #: its id
    why: Literal["pushed", "expired", "cancelled"]


Entry = Join | Cut | NoiseNonce | Handed | NewParams | Replaced | Opened | Closed


def no_counts() -> dict[str, int]:
    """Return zero counts of pushes by status; `refused` counts pushes that raised an error."""
    return dict.fromkeys((*STATUSES, "refused"), 0)
