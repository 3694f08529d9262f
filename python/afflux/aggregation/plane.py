"""The vectors of a server: what a round does with them. A plane knows no client, rule, staleness or task.

RoundPlan   what a round is about to do, as data without vectors of d elements
LocalPlane  the vectors of a server in this process, on the host or one GPU
Prepared    a round whose memory is allocated and whose sweep is checked
"""

from collections.abc import Callable, Mapping, Sequence
from sys import float_info

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from afflux import ops
from afflux._engine import Buffer, PreparedPass
from afflux.aggregation.cache.rows import RowPlane
from afflux.aggregation.cache.staging import NewRows
from afflux.aggregation.cache.table import RowPlan
from afflux.aggregation.streaming import Term
from afflux.arrays.interop import first_beyond
from afflux.arrays.pools import Draft, Slot, Vector, Versions
from afflux.rules.rule import Float64

#: The vectors that a server keeps for its rule, by name, in the order of Rule.rule_vectors.
NamedVectors = Mapping[str, Vector]
#: Receives the checksums of the vectors that a sweep has written, for a store; None: they are not computed.
Checksums = list[ops.Checksums] | None


class RoundPlan(Struct, frozen=True, eq=False):
    """A round that is decided and not prepared. Its repr is what the round is about to do.

    The round writes params of `version`, the vectors of `states`, those of `rule_vectors` that `next` changes, and the
    rows and the sum of `rows`.
    """

    version: int  #: that the round makes
    slots: list[Slot]  #: handles in canonical order; with `terms` only that of their sum
    weights: Float64  #: of the slots
    params_weight: float
    step: ops.Step
    rule_vectors: tuple[str, ...]  #: the names of those that the round reads
    coefficients: tuple[float, ...]  #: their weights in the direction; empty: zeros
    next: Float64 | None  #: row s: the new values of rule vector s, from the direction and all of them
    states: Sequence[str]  #: the names of the vectors of the step
    rows: RowPlan | None
    terms: list[Term]  #: the terms to add to the sum first
    lent: tuple[int, ...]  #: the slots that no push has checked
    most: float  #: the largest magnitude of an element of these


class Prepared(Struct, frozen=True, eq=False):
    """A round for which everything that can fail has been done; only the sweep remains."""

    plan: RoundPlan
    draft: Draft
    sweep: ops.Pass
    rows: NewRows  #: the rows after the sweep
    rule_vectors: NamedVectors  #: after the sweep
    checked: PreparedPass | None  #: the sweep for the engine; None on a GPU, and where vectors are lent

    def make(
        self, num_threads: int, done: list[bool], checksums: Checksums, weights: tuple[Float64, float] | None = None
    ) -> None:
        """Make the sweep. Append to `done` whether all values that it has written are finite.

        A sweep that overwrites none of its inputs can be made again with other `weights`: of the slots, and of params.
        """
        if self.plan.terms:
            self.plan.terms[0].total.add(self.plan.terms, num_threads)
        sweep = self.sweep if weights is None else replace(self.sweep, combine=ops.Combine(self.plan.slots, *weights))
        ops.apply(sweep, num_threads=num_threads, done=done, checksums=checksums, checked=self.checked)

    def bad(self) -> dict[int, str]:
        """Return the problem of each lent vector, by index, that has a non-finite value or a value beyond `most`.

        Vectors of weight 0 are not checked: the sweep does not read them.
        """
        problems: dict[int, str] = {}
        for i in self.plan.lent:
            slot = self.plan.slots[i]
            index = None if self.plan.weights[i] == 0 else first_beyond(slot, self.plan.most)
            if index is not None:
                kind = "non-finite value" if first_beyond(slot, float_info.max) == index else "value beyond max_abs"
                problems[i] = f"{kind} at index {index}"
        return problems

    def release(self) -> None:
        """Release slots and the frozen sweep, which frames of a stored traceback may hold longer."""
        self.plan.slots.clear()  # the sweep's own list
        if self.checked is not None:
            self.checked.release()


class LocalPlane(Struct, frozen=True, eq=False):
    """The vectors of a server as a round finds them."""

    num_threads: int  #: of sweeps
    rule_vectors: NamedVectors
    params: Vector = None  #: of the newest version
    versions: Versions | None = None  #: the memory of the next version
    spares: Callable[[NamedVectors], NamedVectors] | None = None  #: the memory of new rule vectors; None: in place
    rows: RowPlane | None = None

    def gram(self, names: Sequence[str], slots: Sequence[Slot]) -> Float64:
        """Return the inner products of these rule vectors and slots, in this order."""
        return ops.gram([*(self.rule_vectors[name] for name in names), *slots], num_threads=self.num_threads)

    def inner(
        self, slots: Sequence[Slot], weights: Float64 | None, name: str | None, shift: float, own_weight: float
    ) -> ops.InnerProducts:
        """Return the inner products of `Arrivals.inner`; `name` is that of a rule vector."""
        memory, threads = None if name is None else self.rule_vectors[name], self.num_threads
        return ops.inner(slots, weights, memory=memory, shift=shift, memory_weight=own_weight, num_threads=threads)

    def prepare(self, plan: RoundPlan, op: str) -> Prepared:
        """Allocate what a round writes, build its sweep and check it. An error changes nothing.

        Raises:
            StoreError: the disk is full, or a file has vanished.
            AffluxError: all versions are held; the message names `op`, the call that makes the round.
        """
        assert self.versions is not None
        draft = self.versions.take(op)
        vectors, after = self.rule_vectors, self.rule_vectors
        if self.spares is not None and (spares := self.spares(vectors)) is not vectors:
            after = _renewed(plan, vectors, spares)
        both, apart = (plan.rule_vectors, plan.states), after is not vectors
        outs = [[after[name] for name in names] if apart else [] for names in both]
        cache, held, rows = None, None, NewRows({})
        if plan.rows is not None and self.rows is not None:
            cache, rows = self.rows.prepare(plan.rows)
        if names := plan.rule_vectors:
            coefficients = np.array(plan.coefficients or [0.0] * len(names))
            held = ops.RuleVectors([vectors[name] for name in names], coefficients, plan.next, outs[0])
        mix = ops.Combine(plan.slots, plan.weights, plan.params_weight, plan.most)
        states = [vectors[name] for name in plan.states]
        sweep = ops.Pass(self.params, draft.buffer, mix, cache, plan.step, states, held, outs[1])
        checked = ops.check(sweep)
        reads_again = plan.lent or not isinstance(draft.buffer, Buffer)  # the addresses of the arrays
        return Prepared(plan, draft, sweep, rows, after, None if reads_again else checked)


def _renewed(plan: RoundPlan, before: NamedVectors, outs: NamedVectors) -> NamedVectors:
    """Return the rule vectors after a sweep that does not write in place: unchanged vectors keep their memory."""
    vectors = {**before, **{name: outs[name] for name in plan.states}}
    rows = [] if plan.next is None else plan.next.tolist()
    for s, (name, row) in enumerate(zip(plan.rule_vectors, rows, strict=False)):
        if any(value != (k == s) for k, value in enumerate(row)):
            vectors[name] = outs[name]
    return vectors
