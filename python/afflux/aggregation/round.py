"""One server step: a full buffer in canonical order, its weights, and the plan of its sweep."""

from collections.abc import Callable, Sequence
from math import inf, nan
from operator import attrgetter
from time import perf_counter
from typing import Any, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from afflux import ops
from afflux._engine import columns, strict_float_mode
from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.cache.table import RowMoves, RowTable
from afflux.aggregation.frames import note_stored_frames
from afflux.aggregation.inner_products import RoundVectors
from afflux.aggregation.limits import Limits
from afflux.aggregation.plane import DataPlane, NamedVectors, Prepared, RoundPlan
from afflux.aggregation.reports import NoiseNonce, Pulled, Report
from afflux.aggregation.statistics import mixed_buffers
from afflux.aggregation.streaming import Term, factor_of
from afflux.aggregation.weighing import decide
from afflux.arrays.interop import frozen
from afflux.ops.errors import AffluxError
from afflux.ops.exact import ordered_sum
from afflux.rules.rule import EXAMPLES, Arrivals, FactColumns, Float64, Kind, Rule, Scalars, Weights


class RoundStart(Struct, frozen=True, eq=False):
    """The inputs of a round, in addition to its arrivals."""

    current: Pulled
    rule_vectors: NamedVectors
    rows: RowTable | None
    scalars: Scalars
    norms: tuple[float, ...]  #: of arrivals of earlier rounds, oldest first, for `ServerOptions.clip_norms`
    ends_pass: bool
    slot_bytes: int  #: bytes of each vector
    limits: Limits  #: the limits of the server
    fact_names: tuple[str, ...]  #: the names of `Arrivals.facts`
    averaged: int | None  #: the number of the model's buffers that are averaged; None: all
    #: Returns the noise of the weights, with a new nonce; None: the rule needs none.
    draw: Callable[[Weights], ops.Noise] | None = None


class Round(Struct, eq=False):
    """A decided step. `prepare` does everything that can fail; then only the sweep remains."""

    plan: RoundPlan
    terms: list[Term]  #: the terms to add to the sum first
    moves: RowMoves | None  #: the changes of the table of rows
    buffers: Float64 | None  #: after the round
    scalars: Scalars  #: after the round
    norms: tuple[float, ...]  #: after the round
    noise_nonce: NoiseNonce | None  #: the entry of the log
    report: Report  #: its seconds grow with the sweep
    prepared: Prepared = cast(Prepared, None)
    done: list[bool] = []  #: not empty once the sweep has been made
    saved: bool = True  #: whether the store, if any, has recorded the round
    driver: int | None = None  #: the thread that makes it; None: no thread does
    failure: str = ""  #: why its version was refused, once it was

    @property
    def finished(self) -> bool:
        """Swept and saved; only publication remains."""
        return self.saved and bool(self.done)

    @property
    def unsound(self) -> bool:
        """Whether the sweep has written a non-finite value. Then the version is not published, and no state is kept."""
        return bool(self.done) and not self.done[0]

    def release(self) -> None:
        """Release slots and versions after the round: the push that has made the round may hold it longer."""
        self.prepared.release()
        del self.prepared, self.plan, self.terms

    def make(self, plane: DataPlane) -> None:
        """Make the sweep; do nothing if it was made before."""
        if not self.done:
            start = perf_counter()
            for term in self.terms:
                term.add(plane)
            self.prepared.make(self.done)
            # No caller has the report yet.
            force_setattr(self.report, "seconds", self.report.seconds + perf_counter() - start)

    def make_unchecked(self) -> bool:
        """Make the sweep of vectors that no push has checked, and that no later call can read.

        Returns:
            Whether it has read all of them, and they and its results are valid.
        """
        start, sound = perf_counter(), list[bool]()
        if self.report.stepped and all(self.plan.weights.tolist()):
            self.prepared.make(sound)
            force_setattr(self.report, "seconds", self.report.seconds + perf_counter() - start)
        self.done = sound
        return sound == [True]


def prepare(rule: Rule, before: RoundStart, waiting: list[PendingArrival], plane: DataPlane, op: str) -> Round:
    """Decide a round, and prepare its sweep. Only new memory is written, so that an error changes nothing.

    Both use the engine's floating-point mode: in the caller's mode a subnormal weight could be zero.
    """
    start = perf_counter()
    decided: Round = strict_float_mode(_prepared, (rule, before, waiting, plane, op))
    force_setattr(decided.report, "seconds", perf_counter() - start)
    return decided


def _prepared(call: tuple[Rule, RoundStart, list[PendingArrival], DataPlane, str]) -> Round:
    rule, before, waiting, plane, op = call
    decided = decide_round(rule, before, waiting, plane)
    rows = None if before.rows is None else before.rows.memory
    decided.prepared = plane.prepare(decided.plan, before.current.params, before.rule_vectors, rows, op)
    return decided


def decide_round(rule: Rule, before: RoundStart, waiting: list[PendingArrival], plane: DataPlane) -> Round:
    """Return the round of these arrivals, not prepared yet. Nothing changes, and no vector is allocated.

    `plane` computes the inner products, if the rule needs some.
    """
    ordered, slots, *about, joins = columns(waiting, before.current.version)
    terms: list[Term] = slots if isinstance(slots[0], Term) else []
    needs, version = rule.needs, before.current.version + 1
    names = needs.rule_vectors
    memory = before.rule_vectors
    gram = frozen(plane.gram([*(memory[name] for name in names), *slots]), np.float64) if needs.gram else None
    products = RoundVectors(slots, {name: memory[name] for name in names}, plane.inner) if needs.inner else None
    arrivals = _arrivals(before, ordered, about, gram, products, needs.norms)
    try:
        decision = decide(rule, arrivals, products, before.limits, before.norms, removable=not terms)
    finally:
        note_stored_frames()
        if products is not None:
            products.close()
    weights, step = decision.weights, decision.step
    lr = float(step.lr)
    if rule.kind == "gradient":
        step = replace(step, lr=-lr)
    elif type(step.lr) is not float:  # the round's own number, also if the rule changes its object later
        step = replace(step, lr=lr)
    factors, states, moves, rows = weights.vectors, [*rule.states], None, None
    if terms:
        slots = terms[0].total
        try:
            factors = np.array([factor_of(rule, arrivals, factors, terms)])
        finally:
            note_stored_frames()
        terms = sorted([term for term in terms if term.slot is not None], key=attrgetter("place"))
    if before.rows is not None:
        extremes = [w.extremes for w in ordered]
        rows, moves = before.rows.plan(rule.calibrate, arrivals.client_ids, accepted(weights), version, extremes)
    unchecked = any([norm != norm for norm in arrivals.measured_norms.tolist()])
    base, most = params_weight(rule.kind, weights), before.limits.max_abs if unchecked else inf
    vector_weights, trim = weights.rule_vectors, weights.trim
    noise = _noise_of(rule, before, weights)
    plan = RoundPlan(
        version, slots, factors, base, step, names, vector_weights, weights.next, states, rows, most, trim, noise
    )
    scalars = before.scalars if weights.scalars is None else weights.scalars
    report = Report(
        version - weights.skip,
        arrivals.client_ids,
        joins,
        arrivals.versions,
        arrivals.staleness,
        weights.vectors,
        arrivals.measured_norms,
        weights.cosines,
        reasons(weights),
        lr,
        dict(scalars),
        not weights.skip,
        0.0,
        len(ordered) * before.slot_bytes,
        decision.clips,
    )
    buffers = None if before.current.buffers is None else _buffers_of(rule, before, ordered, step, weights)
    noise_nonce = None if noise is None else NoiseNonce(noise.nonce.hex())
    return Round(plan, terms, moves, buffers, scalars, decision.window, noise_nonce, report)


def _noise_of(rule: Rule, before: RoundStart, weights: Weights) -> ops.Noise | None:
    """Return the noise of a round. A round without a key never goes without its noise."""
    if weights.noise == 0 and (weights.next_noise is None or not weights.next_noise.any()):
        return None
    if before.draw is None:
        raise AffluxError(f"[{rule.name}] weigh gave noise, and the server has no noise_key")
    return before.draw(weights)


def params_weight(kind: Kind, weights: Weights) -> float:
    """Return the weight of params in the direction; for rules of kind `model` this is v = sum_i w_i (y_i - params)."""
    return weights.params - ordered_sum(weights.vectors.tolist()) if kind == "model" else weights.params


def reasons(weights: Weights) -> tuple[str, ...]:
    """Return the reason why each arrival was rejected; empty for an arrival that was not."""
    vectors = weights.vectors.tolist()
    if not weights.rejected and all(vectors):
        return ("",) * len(vectors)
    return tuple([weights.rejected.get(i, "" if w else "weight 0") for i, w in enumerate(vectors)])


def accepted(weights: Weights) -> list[bool]:
    """Return whether each arrival is accepted: its weight is not 0, and the rule does not reject it.

    A rule may reject all arrivals and make the step nevertheless (WKAFL).
    """
    return [w != 0 and i not in weights.rejected for i, w in enumerate(weights.vectors.tolist())]


def _arrivals(
    before: RoundStart,
    ordered: list[PendingArrival],
    columns: list[Any],
    gram: Float64 | None,
    sweep: RoundVectors | None,
    reads_norms: bool,
) -> Arrivals:
    """Return the facts about a buffer in canonical order for the rule."""
    client_ids, versions, staleness, num_examples, losses, norms, local_steps = columns
    facts = FactColumns()
    if before.fact_names:
        by_arrival = [dict(arrival.facts) for arrival in ordered]
        facts |= {name: frozen([row.get(name, nan) for row in by_arrival], np.float64) for name in before.fact_names}
        if any(EXAMPLES in row for row in by_arrival):
            counts = [by_arrival[i].get(EXAMPLES, arrival.num_examples) for i, arrival in enumerate(ordered)]
            num_examples = frozen(counts, np.float64)
    return Arrivals(
        before.current.version,
        client_ids,
        versions,
        staleness,
        num_examples,
        losses,
        norms,
        gram,
        before.scalars,
        before.ends_pass,
        sweep,
        local_steps,
        facts,
        reads_norms,
    )


def _buffers_of(
    rule: Rule, before: RoundStart, ordered: Sequence[PendingArrival], step: ops.Step, weights: Weights
) -> Float64 | None:
    """Return the model's buffers after the round."""
    lr = step.lr if step.kind == "sgd" else 1.0  # no optimizer changes buffers
    current, vectors, averaged = before.current.buffers, [w.buffers for w in ordered], before.averaged
    return mixed_buffers(
        rule.kind, current, vectors, weights.vectors, accepted(weights), lr, averaged, trim=weights.trim
    )
