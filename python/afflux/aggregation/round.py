"""One server step: a full buffer in canonical order, its weights, and the sweep that makes the next version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from operator import attrgetter
from sys import float_info
from time import perf_counter
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from afflux import ops
from afflux._engine import Buffer, PreparedPass, columns, strict_float_mode
from afflux.aggregation.arrivals import PendingArrival, canonical
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.cache.staging import NewRows
from afflux.aggregation.cache.table import RowPlan
from afflux.aggregation.frames import note_stored_frames
from afflux.aggregation.limits import Limits
from afflux.aggregation.products import RoundVectors
from afflux.aggregation.reports import Pulled, Report
from afflux.aggregation.statistics import mixed_buffers
from afflux.aggregation.streaming import Term, combine
from afflux.aggregation.weighing import decide
from afflux.arrays.interop import first_beyond, frozen
from afflux.arrays.pools import Draft, Slot, Vector
from afflux.rules.rule import EXAMPLES, Arrivals, Float64, Int64, Kind, Rule, Scalars, Weights

#: The vectors that a server keeps for its rule, by name, in the order of Rule.rule_vectors.
NamedVectors = Mapping[str, Vector]


class RoundStart(Struct, frozen=True, eq=False):
    """The inputs of a round, in addition to its arrivals."""

    current: Pulled
    rows: RowCache | None
    rule_vectors: NamedVectors
    outs: NamedVectors  #: vectors that receive their new values; the same vectors if in place
    scalars: Scalars
    ends_pass: bool
    slot_bytes: int  #: bytes of each vector
    limits: Limits  #: the limits of the server
    norms: tuple[float, ...]  #: of arrivals of earlier rounds, oldest first, for `ServerOptions.clip_norms`
    fact_names: tuple[str, ...]  #: the names of `Arrivals.facts`
    averaged: int | None  #: the number of the model's buffers that are averaged; None: all


class LentVectors(NamedTuple):
    """The lent vectors of a round, and the data to repeat the round without some of them.

    A push does not check a lent vector. A round with lent vectors overwrites none of its inputs, so that it can be
    repeated.
    """

    places: tuple[int, ...]
    rule: Rule
    current: Pulled
    ordered: list[PendingArrival]
    weights: Weights
    max_abs: float
    averaged: int | None  #: as `RoundStart.averaged`

    def bad(self, slots: Sequence[Slot]) -> dict[int, str]:
        """Return the problem of each vector, by index, that has a non-finite value or a value beyond max_abs.

        Vectors of weight 0 are not checked: the sweep does not read them.
        """
        found: dict[int, str] = {}
        for i in self.places:
            index = None if self.weights.vectors[i] == 0 else first_beyond(slots[i], self.max_abs)
            if index is not None:
                kind = "non-finite value" if first_beyond(slots[i], float_info.max) == index else "value beyond max_abs"
                found[i] = f"{kind} at index {index}"
        return found

    def without(self, bad: Mapping[int, str]) -> Weights:
        """Return the weights after rejecting these vectors; the other weights do not change."""
        vectors = np.array(self.weights.vectors)
        vectors[list(bad)] = 0.0
        return replace(self.weights, vectors=frozen(vectors, np.float64), rejected={**self.weights.rejected, **bad})


@dataclass(slots=True, eq=False)
class Round:
    """A decided step: everything that can fail has been done, and only the sweep remains."""

    slots: list[Slot]
    draft: Draft
    sweep: ops.Pass
    rows: NewRows  #: the rows after the sweep
    row_plan: RowPlan | None  #: the changes of the table of rows
    rule_vectors: NamedVectors  #: after the round
    buffers: Float64 | None  #: after the round
    scalars: Scalars  #: after the round
    norms: tuple[float, ...]  #: after the round
    report: Report  #: its seconds grow with the sweep
    done: list[bool] = field(default_factory=list)  #: not empty once the sweep has been made
    terms: list[Term] = field(default_factory=list)  #: terms to add before the sweep
    checked: PreparedPass | None = None  #: the sweep for the engine; None on a GPU, and where vectors are lent
    lent: LentVectors | None = None  #: vectors that were not checked when they were pushed
    saved: bool = True  #: whether its rows are in their final memory, and the store, if any, has recorded the round
    checksums: list[ops.Checksums] | None = None  #: of the vectors that the sweep has written, for a store
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
        self.slots.clear()  # the sweep's own list
        if self.checked is not None:
            self.checked.release()  # frames of a stored traceback may hold it
        self.lent = self.checked = None
        del self.sweep, self.draft

    def make(self, num_threads: int) -> None:
        """Make the sweep; do nothing if it was made before."""
        if not self.done:
            start = perf_counter()
            if self.terms:
                self.terms[0].total.add(self.terms, num_threads)
            if self.lent is None:
                done, sums = self.done, self.checksums
                ops.apply(self.sweep, num_threads=num_threads, done=done, checksums=sums, checked=self.checked)
            else:
                self._make_with_lent(self.lent, num_threads)
            # No caller has the report yet.
            force_setattr(self.report, "seconds", self.report.seconds + perf_counter() - start)

    def _make_with_lent(self, lent: LentVectors, num_threads: int) -> None:
        """Make the sweep; repeat it without vectors that are invalid. An interrupted call may be repeated."""
        sound: list[bool] = []
        ops.apply(self.sweep, num_threads=num_threads, done=sound, checksums=self.checksums)
        if not sound[0]:
            # In the engine's floating-point mode, like `prepare`.
            strict_float_mode(lambda known: self._make_without(known, num_threads, sound), lent)
        self.done.append(sound[-1])

    def _make_without(self, lent: LentVectors, num_threads: int, sound: list[bool]) -> None:
        """Repeat the sweep without the arrivals that hold invalid values, if there are any."""
        bad = lent.bad(self.slots)
        if not bad:
            return  # a result of the round is not finite
        weights = lent.without(bad)
        mix = ops.Combine(self.slots, weights.vectors, params_weight(lent.rule.kind, weights.vectors))
        sweep = replace(self.sweep, combine=mix)
        ops.apply(sweep, num_threads=num_threads, done=sound, checksums=self.checksums)
        self.buffers = _buffers_of(lent.rule, lent.current, lent.averaged, lent.ordered, sweep, weights)
        force_setattr(self.report, "weights", weights.vectors)
        force_setattr(self.report, "rejected", reasons(weights))


def prepare(rule: Rule, before: RoundStart, waiting: Sequence[PendingArrival], draft: Draft, num_threads: int) -> Round:
    """Decide a round. Only new memory is written, so that an error changes nothing.

    The computation uses the engine's floating-point mode: the caller's mode could set a subnormal weight to zero.
    """
    return strict_float_mode(lambda call: _prepare(*call), (rule, before, canonical(waiting), draft, num_threads))


def _prepare(rule: Rule, before: RoundStart, ordered: list[PendingArrival], draft: Draft, num_threads: int) -> Round:
    start = perf_counter()
    slots, terms = split(ordered)
    needs, states = rule.needs, rule.states
    rule_vectors = before.rule_vectors
    held = [rule_vectors[name] for name in needs.rule_vectors]
    gram = frozen(ops.gram([*held, *slots], num_threads=num_threads), np.float64) if needs.gram else None
    asked = RoundVectors(slots, needs.rule_vectors, held, num_threads) if needs.inner else None
    arrivals, joins = freeze(before, ordered, gram, asked)
    try:
        decision = decide(rule, arrivals, asked, before.limits, before.norms, removable=not terms)
    finally:
        note_stored_frames()
        if asked is not None:
            asked.close()
    weights, step = decision.weights, decision.step
    lr = float(step.lr)
    if rule.kind == "gradient":
        step = replace(step, lr=-lr)
    elif type(step.lr) is not float:  # the round's own number, also if the rule changes its object later
        step = replace(step, lr=lr)
    weight_of_params = params_weight(rule.kind, weights.vectors)
    lent = [i for i, w in enumerate(ordered) if w.norm != w.norm]
    if terms:
        slots = terms[0].total.vectors
        try:
            mix = combine(rule, arrivals, weights.vectors, terms, weight_of_params)
        finally:
            note_stored_frames()
    else:
        mix = ops.Combine(slots, weights.vectors, weight_of_params, before.limits.max_abs if lent else inf)
    rows, row_plan, cache, held_vectors = NewRows({}), None, None, None
    if before.rows is not None:
        version, extremes = before.current.version + 1, [w.extremes for w in ordered]
        row_plan = before.rows.plan(rule.calibrate, arrivals.client_ids, accepted(weights), version, extremes)
        cache, rows = before.rows.plane.prepare(row_plan)
    after = rule_vectors
    if apart := before.outs is not after:
        after = renewed(rule, before, weights)
    outs = [[after[name] for name in names] if apart else [] for names in (needs.rule_vectors, states)]
    if held:
        held_vectors = ops.RuleVectors(held, np.array(weights.rule_vectors or [0.0] * len(held)), weights.next, outs[0])
    sweep = ops.Pass(
        before.current.params,
        draft.buffer,
        mix,
        cache,
        step,
        [rule_vectors[name] for name in states],
        held_vectors,
        outs[1],
    )
    checked = ops.check(sweep)
    scalars = before.scalars if weights.scalars is None else weights.scalars
    report = Report(
        before.current.version + (not weights.skip),
        arrivals.client_ids,
        joins,
        arrivals.versions,
        arrivals.staleness,
        weights.vectors,
        arrivals.norms,
        weights.cosines,
        reasons(weights),
        lr,
        dict(scalars),
        not weights.skip,
        perf_counter() - start,
        len(ordered) * before.slot_bytes,
        decision.clips,
    )
    buffers = _buffers_of(rule, before.current, before.averaged, ordered, sweep, weights)
    pending = Round(slots, draft, sweep, rows, row_plan, after, buffers, scalars, decision.window, report)
    if not lent and isinstance(draft.buffer, Buffer):  # otherwise the addresses of the arrays are read again
        pending.checked = checked
    if terms:
        pending.terms = sorted([term for term in terms if term.slot is not None], key=attrgetter("place"))
    if lent:
        pending.lent = LentVectors(
            tuple(lent), rule, before.current, ordered, weights, before.limits.max_abs, before.averaged
        )
    return pending


def split(ordered: Sequence[PendingArrival]) -> tuple[list[Slot], list[Term]]:
    """Return the slots of the arrivals in slots, and the terms of the arrivals that are added up."""
    slots: list[Slot] = []
    terms: list[Term] = []
    for arrival in ordered:
        slot = arrival.slot
        if isinstance(slot, Term):
            terms.append(slot)
        else:
            slots.append(slot)
    return slots, terms


def params_weight(kind: Kind, weights: Float64) -> float:
    """Return the weight of params in the direction: v = sum_i w_i (y_i - params) for rules of kind `model`."""
    own = 0.0
    if kind == "model":
        for weight in weights.tolist():
            own = own - weight
    return own


def reasons(weights: Weights) -> tuple[str, ...]:
    """Return the reason why each arrival was rejected; empty for an arrival that was not."""
    vectors = weights.vectors.tolist()
    if not weights.rejected and all(vectors):
        return ("",) * len(vectors)
    return tuple([weights.rejected.get(i, "" if w else "weight 0") for i, w in enumerate(vectors)])


def renewed(rule: Rule, before: RoundStart, weights: Weights) -> NamedVectors:
    """Return the rule vectors after a sweep that does not write in place: unchanged vectors keep their memory."""
    outs = before.outs
    rule_vectors = {**before.rule_vectors, **{name: outs[name] for name in rule.states}}
    rows = [] if weights.next is None else weights.next.tolist()
    for s, (name, row) in enumerate(zip(rule.needs.rule_vectors, rows, strict=False)):
        if any(value != (k == s) for k, value in enumerate(row)):
            rule_vectors[name] = outs[name]
    return rule_vectors


def accepted(weights: Weights) -> list[bool]:
    """Return whether each arrival is accepted: its weight is not 0, and the rule does not reject it.

    A rule may reject all arrivals and make the step nevertheless (WKAFL).
    """
    return [w != 0 and i not in weights.rejected for i, w in enumerate(weights.vectors.tolist())]


def freeze(
    before: RoundStart, ordered: list[PendingArrival], gram: Float64 | None, sweep: RoundVectors | None
) -> tuple[Arrivals, Int64]:
    """Return the facts about a buffer in canonical order for the rule, and the numbers of the joins."""
    # The staleness is that of the join, except for arrivals that waited for the next pass.
    versions, staleness, num_examples, losses, norms, local_steps, joins = columns(ordered, before.current.version)
    facts: dict[str, Float64] = {}
    if before.fact_names:
        by_arrival = [dict(arrival.facts) for arrival in ordered]
        facts = {name: frozen([each.get(name, nan) for each in by_arrival], np.float64) for name in before.fact_names}
        if any(EXAMPLES in each for each in by_arrival):
            counts = [by_arrival[i].get(EXAMPLES, arrival.num_examples) for i, arrival in enumerate(ordered)]
            num_examples = frozen(counts, np.float64)
    arrivals = Arrivals(
        before.current.version,
        tuple([arrival.client_id for arrival in ordered]),
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
    )
    return arrivals, joins


def _buffers_of(
    rule: Rule, current: Pulled, averaged: int | None, ordered: list[PendingArrival], sweep: ops.Pass, weights: Weights
) -> Float64 | None:
    """Return the model's buffers after the round."""
    if current.buffers is None:
        return None
    lr = sweep.step.lr if isinstance(sweep.step, ops.Sgd) else 1.0  # no optimizer changes buffers
    vectors = [w.buffers for w in ordered]
    return mixed_buffers(rule.kind, current.buffers, vectors, weights.vectors, accepted(weights), lr, averaged)
