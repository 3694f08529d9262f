"""One server step: a full buffer in canonical order, its weights, and the sweep that makes the next version."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from afflux import ops
from afflux.algebra import ordered_sum
from afflux.errors import AffluxError
from afflux.receipts import Pulled, Report, frozen, sealed
from afflux.rule import Arrivals, ClientId, Float64, Rule, Scalars, Weights
from afflux.slots import Slot
from afflux.store import MemoryRows, Rows
from afflux.versions import Draft, Vector

#: What is known of an arrival before it joins: the first fields of Waiting.
Pushed = tuple[ClientId, int, int, float, float, Slot, Float64 | None]
#: The vectors that a server keeps for its rule, by name, in the order of Rule.memories.
Memories = Mapping[str, Vector]


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


class Before(NamedTuple):
    """What a round starts from, beside its arrivals."""

    current: Pulled
    rows: MemoryRows | None
    memories: Memories
    scalars: Scalars
    ends_pass: bool


@dataclass(slots=True, eq=False)
class Round:
    """A step that was decided: everything that can fail has been done, only the sweep remains."""

    slots: list[Slot]
    draft: Draft
    sweep: ops.Pass
    rows: Rows  #: as they are after the sweep
    buffers: Float64 | None  #: as they are after the round
    scalars: Scalars  #: likewise
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


def prepare(rule: Rule, before: Before, waiting: Sequence[Waiting], draft: Draft, num_threads: int) -> Round:
    """Decides a round. Writes nothing but memory of its own, so that whatever raises here leaves no trace."""
    start = perf_counter()
    ordered = sorted(waiting, key=lambda w: (w.client_id, w.version, w.join))
    slots = [w.slot for w in ordered]
    held = [before.memories[name] for name in rule.needs.memories]
    gram = frozen(ops.gram([*held, *slots], num_threads=num_threads), np.float64) if rule.needs.gram else None
    arrivals = freeze(before, ordered, gram)
    weights = checked_weights(rule, arrivals)
    step = rule.step(arrivals)
    lr = float(step.lr)
    if not -inf < lr < inf:
        raise AffluxError(f"[{rule.name}] step gave lr {lr}, must be finite")
    params_weight = 0.0
    if rule.kind == "model":
        for weight in weights.vectors:
            params_weight = params_weight - float(weight)
    rows: Rows = {}
    cache, memory = None, None
    if before.rows is not None:
        accepted = [w != 0 for w in weights.vectors]
        cache, rows = before.rows.stage(rule.calibrate, arrivals.client_ids, accepted)
    if held:
        memory = ops.Memory(held, np.array(weights.memories or [0.0] * len(held)), weights.next)
    sweep = ops.Pass(
        before.current.params,
        draft.buffer,
        ops.Combine(slots, weights.vectors, params_weight),
        cache,
        replace(step, lr=-lr if rule.kind == "gradient" else lr),
        [before.memories[name] for name in rule.states],
        memory,
    )
    scalars = before.scalars if weights.scalars is None else weights.scalars
    report = Report(
        before.current.version + (not weights.skip),
        arrivals.client_ids,
        frozen([w.join for w in ordered], np.int64),
        arrivals.versions,
        arrivals.staleness,
        weights.vectors,
        arrivals.norms,
        weights.cosines,
        tuple(weights.rejected.get(i, "" if w else "weight 0") for i, w in enumerate(weights.vectors)),
        lr,
        scalars,
        not weights.skip,
        perf_counter() - start,
    )
    return Round(slots, draft, sweep, rows, mixed_buffers(rule, before.current, ordered, sweep), scalars, report)


def freeze(before: Before, ordered: list[Waiting], gram: Float64 | None) -> Arrivals:
    """The rule's view of a buffer in canonical order."""
    version = before.current.version
    return Arrivals(
        version,
        tuple(w.client_id for w in ordered),
        frozen([w.version for w in ordered], np.int64),
        # That of the join, but for those that have waited for the next pass.
        frozen([version - w.version for w in ordered], np.int64),
        frozen([w.num_examples for w in ordered], np.int64),
        frozen([w.loss for w in ordered], np.float64),
        frozen([w.norm for w in ordered], np.float64),
        gram,
        before.scalars,
        before.ends_pass,
    )


def checked_weights(rule: Rule, arrivals: Arrivals) -> Weights:
    """The rule's weights; for cached rules their sum is 1 over the arrivals that are not rejected."""
    given = rule.weigh(arrivals)
    weights = given if isinstance(given, Weights) else Weights(given)
    count, held, name = len(arrivals), len(rule.needs.memories), rule.name
    vectors = np.array(weights.vectors, np.float64)
    if vectors.shape != (count,):
        raise AffluxError(f"[{name}] weigh gave shape {vectors.shape}, the buffer holds {count} arrivals")
    for client_id, weight in zip(arrivals.client_ids, vectors, strict=True):
        if not -inf < weight < inf:
            raise AffluxError(f"[{name}] weigh gave client {client_id!r} the weight {weight}, must be finite")
    if rule.calibrate.cached:
        total = ordered_sum(vectors)
        if not -inf < total < inf:
            raise AffluxError(f"[{name}] the weights that weigh gave sum to {total}, must be finite")
        # Weights that were divided by their sum already are one to rounding, and stay as they are.
        if total != 0 and abs(total - 1.0) > count * sys.float_info.epsilon:
            vectors = vectors / total
    next_ = weights.next if weights.next is None else frozen(weights.next, np.float64)
    for what, array, shape in (
        ("memories", np.array(weights.memories, np.float64), (held if weights.memories else 0,)),
        ("next", np.zeros((held, held + count)) if next_ is None else next_, (held, held + count)),
        ("cosines", np.zeros(count) if weights.cosines is None else weights.cosines, (count,)),
    ):
        if array.shape != shape or not np.isfinite(array).all():
            raise AffluxError(f"[{name}] weigh gave {what} of shape {array.shape}, must be {shape} finite numbers")
    scalars = weights.scalars
    if scalars is not None:
        if set(scalars) != set(rule.needs.scalars):
            raise AffluxError(f"[{name}] weigh gave scalars {sorted(scalars)}, must be {sorted(rule.needs.scalars)}")
        scalars = MappingProxyType({key: float(value) for key, value in scalars.items()})
    cosines = weights.cosines if weights.cosines is None else frozen(weights.cosines, np.float64)
    return replace(weights, vectors=frozen(vectors, np.float64), next=next_, scalars=scalars, cosines=cosines)


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
        # Never through an optimizer.
        step = sweep.step if isinstance(sweep.step, ops.Sgd) else ops.Sgd()
        ops.apply(ops.Pass(current.buffers, out, mix, step=step), num_threads=1)
    else:
        accepted = np.array([float(w != 0) for w in weights])
        count = ordered_sum(accepted)
        if count == 0:
            return current.buffers
        zeros = np.zeros(out.size)
        ops.apply(ops.Pass(zeros, out, ops.Combine(vectors, accepted), step=ops.Sgd(1.0 / count)), num_threads=1)
    return sealed(out)
