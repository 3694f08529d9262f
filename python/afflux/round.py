"""One server step: a full buffer in canonical order, its weights, and the sweep that makes the next version."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np

from afflux import ops
from afflux.errors import AffluxError
from afflux.receipts import Pulled, Report, frozen, sealed
from afflux.rule import Arrivals, ClientId, Float64, Rule
from afflux.slots import Slot
from afflux.store import MemoryRows, Rows
from afflux.versions import Draft
from afflux.weigh import ordered_sum

#: What is known of an arrival before it joins: the first fields of Waiting.
Pushed = tuple[ClientId, int, int, float, float, Slot, Float64 | None]


class Waiting(NamedTuple):
    """An arrival in the buffer."""

    client_id: ClientId
    version: int
    num_examples: int
    loss: float
    norm: float
    slot: Slot
    buffers: Float64 | None
    join: int
    staleness: int


@dataclass(slots=True, eq=False)
class Round:
    """A step that was decided: everything that can fail has been done, only the sweep remains."""

    slots: list[Slot]
    draft: Draft
    sweep: ops.Pass
    rows: Rows  #: as they are after the sweep
    buffers: Float64 | None  #: as they are after the round
    report: Report  #: its seconds grow with the sweep
    done: list[None] = field(default_factory=list)  #: not empty once the sweep has been made
    drive: tuple[Callable[[], object | None], int] | None = None  #: whether its maker is still at it, and which thread

    @property
    def driver(self) -> int | None:
        """The thread that makes the sweep; None if there is none, or if it was interrupted."""
        return None if self.drive is None or self.drive[0]() is None else self.drive[1]

    def release(self) -> None:
        """Lets go of the slots, once the sweep has been made."""
        self.slots.clear()  # the sweep's own list

    def make(self, num_threads: int) -> None:
        """The sweep; nothing if it has been made."""
        if not self.done:
            start = perf_counter()
            ops.apply(self.sweep, num_threads=num_threads, done=self.done)
            self.report = replace(self.report, seconds=self.report.seconds + perf_counter() - start)


def prepare(rule: Rule, current: Pulled, waiting: Sequence[Waiting], rows: MemoryRows | None, draft: Draft) -> Round:
    """Decides a round. Writes nothing but memory of its own, so that whatever raises here leaves no trace."""
    start = perf_counter()
    ordered = sorted(waiting, key=lambda w: (w.client_id, w.version, w.join))
    arrivals = freeze(current.version, ordered)
    weights = checked_weights(rule, arrivals)
    step = rule.step(arrivals)
    lr = float(step.lr)
    if not -inf < lr < inf:
        raise AffluxError(f"[{rule.name}] step gave lr {lr}, must be finite")
    params_weight = 0.0
    if rule.kind == "model":
        for weight in weights:
            params_weight = params_weight - float(weight)
    cache, after = (None, {}) if rows is None else rows.stage(arrivals.client_ids, [w != 0 for w in weights])
    signed = replace(step, lr=-lr if rule.kind == "gradient" else lr)
    slots = [w.slot for w in ordered]
    sweep = ops.Pass(current.params, draft.buffer, ops.Combine(slots, weights, params_weight), cache, signed)
    report = Report(
        current.version + 1,
        arrivals.client_ids,
        arrivals.staleness,
        weights,
        arrivals.norms,
        lr,
        perf_counter() - start,
    )
    return Round(slots, draft, sweep, after, mixed_buffers(rule, current, ordered, sweep), report)


def freeze(version: int, ordered: list[Waiting]) -> Arrivals:
    """The rule's view of a buffer in canonical order."""
    return Arrivals(
        version,
        tuple(w.client_id for w in ordered),
        frozen([w.version for w in ordered], np.int64),
        frozen([w.staleness for w in ordered], np.int64),
        frozen([w.num_examples for w in ordered], np.int64),
        frozen([w.loss for w in ordered], np.float64),
        frozen([w.norm for w in ordered], np.float64),
    )


def checked_weights(rule: Rule, arrivals: Arrivals) -> Float64:
    """The rule's weights; for cached rules their sum is 1 over the arrivals that are not rejected."""
    weights = np.array(rule.weigh(arrivals), np.float64)
    if weights.shape != (len(arrivals),):
        raise AffluxError(f"[{rule.name}] weigh gave shape {weights.shape}, the buffer holds {len(arrivals)} arrivals")
    for client_id, weight in zip(arrivals.client_ids, weights, strict=True):
        if not -inf < weight < inf:
            raise AffluxError(f"[{rule.name}] weigh gave client {client_id!r} the weight {weight}, must be finite")
    if rule.calibrate.cached:
        total = ordered_sum(weights)
        if not -inf < total < inf:
            raise AffluxError(f"[{rule.name}] the weights that weigh gave sum to {total}, must be finite")
        # Weights that were divided by their sum already are one to rounding, and stay as they are.
        if total != 0 and abs(total - 1.0) > len(weights) * sys.float_info.epsilon:
            weights = weights / total
    return frozen(weights, np.float64)


def mixed_buffers(rule: Rule, current: Pulled, ordered: list[Waiting], sweep: ops.Pass) -> Float64 | None:
    """The model's buffers after the round: mixed like the params for rules of kind `model` (FedAsync's authors), else
    the plain mean over the accepted arrivals (FADAS's authors); as they were if all are rejected.
    """
    if current.buffers is None:
        return None
    weights = sweep.combine.weights
    vectors = [w.buffers for w in ordered]
    out = np.empty_like(current.buffers)
    if rule.kind == "model":
        mix = ops.Combine(vectors, weights, sweep.combine.params_weight)
        ops.apply(ops.Pass(current.buffers, out, mix, step=sweep.step), num_threads=1)
    else:
        accepted = np.array([float(w != 0) for w in weights])
        count = ordered_sum(accepted)
        if count == 0:
            return current.buffers
        zeros = np.zeros(out.size)
        ops.apply(ops.Pass(zeros, out, ops.Combine(vectors, accepted), step=ops.Sgd(1.0 / count)), num_threads=1)
    return sealed(out)
