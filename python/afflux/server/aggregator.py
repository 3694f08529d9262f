"""The decision about each push, and the round that the push completes, one after the other."""

from collections.abc import Callable, Mapping
from functools import partial
from logging import getLogger
from os import urandom
from threading import get_ident
from typing import Any, Literal, Protocol, TypeVar

from msgspec.structs import replace

from afflux import ops
from afflux._engine import forks
from afflux.aggregation.admission import Admission
from afflux.aggregation.arrivals import PendingArrival, Pushed
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.plane import DataPlane, Slot, Vector
from afflux.aggregation.reports import NewParams, Pulled, Receipt, Replaced, Report
from afflux.aggregation.round import Round, prepare
from afflux.ops.errors import AffluxError, BusyError, StoreError
from afflux.ops.units import ITEM_BYTES
from afflux.rules.rule import ClientId, Float64, Rule, Weights
from afflux.server.concurrency import Monitor
from afflux.server.decisions import RoundStorage, arrival_of, with_term
from afflux.server.norm_watch import NormWatch
from afflux.server.pending_push import TaskClosedError, Ticket
from afflux.server.progress_watch import DropWatch, ProgressWatch
from afflux.server.step_callbacks import OnStep, StepCalls
from afflux.server.tasks import release_one

_Result = TypeVar("_Result")


def _random_nonce(version: int) -> bytes:
    return urandom(12)  # also in a forked child, and where an earlier state is loaded


class Batch(Protocol):
    """The pushes of one `Server.step` (`afflux.server.step.StepBatch`). Each method is called with the mutex."""

    held_back: int  #: as `Cut.joins`

    def decided(self) -> Admission:
        """Return a draft that has the decisions about all pushes; an error changes nothing. May be repeated."""

    def sweep(self, decided: Round | None) -> None:
        """Make the sweep of the round, if there is one that reads callers' arrays; an error changes nothing."""

    def adopt(self, draft: Admission) -> None:
        """Make the decisions of the draft those of the server."""


class Aggregator(Monitor[Round]):
    """All parts of a server that a round needs, as a `Monitor` for the threads that use them.

    An aggregator admits arrivals, makes rounds and publishes versions. `admission` owns all that is decided; each
    decision is one call, so that reading it needs no mutex.
    """

    def __init__(
        self,
        plane: DataPlane,
        size: int,
        options: ServerOptions,
        admission: Admission,
        on_step: OnStep | None,
        norm_watch: NormWatch | None = None,
    ) -> None:
        super().__init__(admission.mutex)
        self.plane, self.alone = plane, plane.alone
        self.admission = admission
        self.max_slots, self.max_versions = options.slots_of(admission.rule), options.max_versions
        self.accumulate, self.records_faults = options.accumulate, options.faults == "record"
        self.size, self.inplace, self.slot_dtype = size, options.inplace, options.slots_as
        self.slot_bytes = ITEM_BYTES[self.slot_dtype] * size
        self.norm_watch = norm_watch
        self._progress_watch = ProgressWatch()
        self.drop_watch = DropWatch()
        self.reading: set[object] = set()  #: one for each call that reads a version
        self.retained: Mapping[int, Pulled] = {}  #: older versions that the last checkpoint was asked to keep
        self.storage: RoundStorage | None = None
        self.noise: ops.Noise | None = None  #: the key of noise; None: the rule needs none
        #: Returns the nonce of the round that makes this version: another one for each round that is decided.
        self.nonce_of: Callable[[int], bytes] = _random_nonce
        self._step_calls = None if on_step is None else StepCalls(on_step, admission)

    @property
    def rule(self) -> Rule:
        """The rule of the arrivals in the buffer."""
        return self.admission.rule

    def attach(self, storage: RoundStorage) -> None:
        """Use a store for the state from now on."""
        self.storage, self.alone = storage, str(storage.path)
        self.admission.attach(storage.commit_every)

    # Entering

    def enter(self, op: str) -> None:
        """Reject calls that cannot be made, or that would deadlock.

        Raises:
            StoreError: the server is closed.
            AffluxError: a step has written a value that is not finite, or the call comes from within another call of
                this thread.
            UnavailableError: a forked child cannot use the server.
        """
        admission = self.admission
        mutex = admission.mutex
        if forks[0] != mutex.fork:
            self.check_process(op)
        if admission.closed or admission.failure:
            self._check_open(op)
        making = admission.round if mutex.handed_out else None
        if mutex.is_mine or (making is not None and making.driver == get_ident()):
            raise AffluxError(
                f"[{op}] called from within the rule's weigh or step, or by a signal handler, amid another call of "
                "this thread"
            )

    def _check_open(self, op: str) -> None:
        closed, failure = self.admission.closed, self.admission.failure
        if closed and self.storage is not None:
            raise StoreError(f"[{op}] this server is closed: Server.open({str(self.storage.path)!r}) continues it")
        if failure and op not in ("load_state_dict", "close"):
            raise AffluxError(f"[{op}] {failure}")

    def check_storage(self) -> None:
        """Raise StoreError if files of the store are missing or truncated."""
        if self.storage is not None and not self.admission.closed:
            self.storage.check()

    # Waiting

    def when_idle(self, op: str, action: Callable[[], _Result], *, makes_version: bool = False) -> _Result:
        """Call `action` with the mutex, after the decided round was made and all terms were added.

        With `makes_version` also after calls that read a version have made room for the one that `action` makes, unless
        only tasks hold those that are in its way: `make_room` gives them up.
        """
        outcome = self.wait_for(partial(self._when_idle, op, action, makes_version))  # no closure
        assert outcome is not None  # it was given no timeout
        return outcome[0]

    def _when_idle(self, op: str, action: Callable[[], _Result], makes_version: bool) -> tuple[_Result] | None:
        self._check_open(op)
        self.check_storage()
        self._add_last_term()
        if self.admission.round is not None or (makes_version and self._full and self.reading):
            return None
        return (action(),)

    def when_no_job_runs(self, action: Callable[[], None]) -> None:
        """Call `action` with the mutex, when no thread makes a round; start none."""

        def attempt() -> bool | None:
            making = self.admission.round
            if making is not None and making.driver is not None:
                return None
            action()
            return True

        self.wait_for(attempt, work=False)

    def count_refused(self) -> None:
        """Count a push that raises an error; in a forked child that cannot use the server do nothing."""
        mutex = self.admission.mutex
        if forks[0] != mutex.fork:
            return
        count = partial(self.admission.count_push, "refused", None, None, None, None)
        if mutex.is_mine:  # the push is amid another call of this thread
            count()
        else:
            self.locked(count)

    def take_slot(self, timeout: float | None) -> Slot:
        """Return a free slot, a new one, or the next one that becomes free.

        Raises:
            BusyError: all slots are in use for `timeout` seconds.
        """
        if self.admission.replaying and self.admission.by_flush:  # perhaps of a step of more pushes
            return self.any_slot()
        slot = self.plane.reserve()
        return self.checked("push", self.wait_for(self._free_slot, timeout)) if slot is None else slot

    def any_slot(self) -> Slot:
        """Return a free slot; if all are in use, a new one beyond the limit."""
        slot = self.plane.reserve()
        return Slot(self.plane.reserve(counted=False)) if slot is None else slot

    def checked(self, op: str, slot: Slot | None) -> Slot:
        """Return the slot; raise BusyError if it is None."""
        if slot is None:
            raise BusyError(
                f"[{op}] all {self.max_slots} slots of max_slots are taken: by arrivals that wait, that are being "
                "pushed, or that are in the round being made"
            )
        return slot

    def _free_slot(self) -> Slot | None:
        self._check_open("push")
        self._add_last_term()
        slot = self.plane.reserve()
        if slot is None and self.admission.by_flush and self.admission.slots_held >= self.max_slots:
            self.checked("push", None)  # only a flush could free one, perhaps of this thread
        return slot

    # Deciding

    def join(self, pushed: Pushed, ticket: Ticket) -> Receipt:
        """Decide about an arrival, and make the round that it completes."""
        task_id = None if ticket.task is None else ticket.task.task
        receipt: Receipt | None = self.admission.join(pushed, ticket.staged_row, task_id, ticket.decided)
        if receipt is None:
            receipt = self.wait_for(partial(self._joined, pushed, ticket))  # no closure
            assert receipt is not None  # it was given no timeout
            if (completed := ticket.completed) is not None:
                report = completed.report
                if self.norm_watch is not None:
                    self.norm_watch.see(report)
                ticket.made_step = True
                status, staleness, _, join, step, _, durable, _ = receipt
                step = step if report.stepped else None
                # Without the class's own __new__: that call takes three times as long.
                receipt = tuple.__new__(
                    Receipt, (status, staleness, self.admission.version, join, step, report, durable, "")
                )
                ticket.completed = completed = None  # the round holds versions of params
        return receipt if receipt.status == "joined" else self.watched(receipt, pushed[0])

    def watched(self, receipt: Receipt, client_id: ClientId) -> Receipt:
        """Return the receipt of an arrival that brings no round nearer, after the warnings about such arrivals."""
        if warning := self.locked(partial(self._progress_watch.see, self.admission)):
            getLogger("afflux").warning(warning)
        self.drop_watch.see(receipt.status, client_id, receipt.reason)
        return receipt

    def _joined(self, pushed: Pushed, ticket: Ticket) -> Receipt | None:
        """Return the receipt; None until the round that the arrival completes is published or skipped."""
        admission = self.admission
        if not ticket.decided:
            if admission.closed or admission.failure:
                self._check_open("push")
            task_id = None if ticket.task is None else ticket.task.task
            if task_id is not None and not admission.is_open(task_id):
                raise TaskClosedError(f"[push] task {task_id} is closed")
            status, staleness, completes = admission.check(pushed)
            if completes and (admission.round is not None or not self.make_room()):
                return None
            if self.accumulate:
                self._add_last_term()
                if status == "joined":
                    pushed = with_term(admission, pushed, staleness, self.plane)
            completed = None
            if completes:
                self.check_storage()
                arrival = arrival_of(admission, pushed, staleness, ticket.staged_row)
                completed = self._prepared("push", [*admission.arrivals(), arrival])
            ticket.completed = completed
            admission.record(pushed, ticket.staged_row, task_id, completed, ticket.decided)
            if self.accumulate:
                self._add_last_term()
        if self._has_ended("push", ticket.completed):
            receipt: Receipt = ticket.decided[0]
            return receipt
        self._check_open("push")
        return None

    def _add_last_term(self) -> None:
        """Add the vector of the last join to the sum of a server that accumulates, unless its push has added it."""
        if (term := self.admission.last_term) is not None:
            term.add(self.plane)

    def _has_ended(self, op: str, decided: Round | None) -> bool:
        """Return whether a round was made; True if there is no round. The server may be closed since the round.

        Raises:
            StoreError: the server was closed before the round was made.
            AffluxError: the round's step, or an earlier one, has written a value that is not finite.
        """
        waits = decided is not None and self.admission.round is decided
        if waits:
            self._check_open(op)
        elif decided is not None and decided.failure:  # also if another thread has closed the server, or loaded a state
            raise AffluxError(f"[{op}] {decided.failure}")
        return not waits

    def make_room(self) -> bool:
        """Release bases of tasks to make room for a version.

        Returns:
            False if a push that reads a version must end first.
        """
        while self._full and release_one(self.admission):
            pass
        return not (self.reading and self._full)

    @property
    def _full(self) -> bool:
        """Whether a round would find no memory for its version."""
        most = self.max_versions
        return most is not None and not self.inplace and self.plane.versions_held >= most

    def hand_in(self, name: str, vector: Vector) -> None:
        """Replace one of the rule's vectors."""
        admission = self.admission
        self.when_idle("set_rule_vector", lambda: admission.hand_in({**admission.rule_vectors, name: vector}, name))

    def set_params(self, vector: Vector, buffers: Float64 | None, commit: Callable[[], None]) -> int:
        """Make a version of this vector, and of these buffers of the model; None: they do not change.

        Returns:
            Its number.
        """
        return self.when_idle("set_params", partial(self._set_version, vector, buffers, commit), makes_version=True)

    def _set_version(self, vector: Vector, buffers: Float64 | None, commit: Callable[[], None]) -> int:
        admission, plane = self.admission, self.plane
        if admission.filled:
            raise AffluxError(
                f"[set_params] {admission.filled} arrivals wait, which were trained from earlier params: flush() "
                "or discard() them first"
            )
        number = admission.version + 1
        self.make_room()
        now, write = admission.current, partial(plane.fill, values=plane.read(vector, copy=False))
        params = now.params if self.inplace else plane.version(write, "set_params")
        new = Pulled(params, number, now.buffers if buffers is None else buffers)
        try:
            admission.set_version(new, NewParams())
            if self.inplace:
                write(params)
        except BaseException:  # an interrupt: a version that is made needs its params
            if self.inplace and admission.version == number:
                write(params)
            raise
        commit()
        return number

    def flush(
        self, *, late: bool = False, batch: Batch | None = None, joins: int = 0, ends_pass: bool = False
    ) -> Report | None:
        """Make the round of the waiting arrivals and of those of a batch; with `ends_pass` the last one of the pass.

        The arrivals of the batch and the round are one decision. `joins` is that of the log's entry, in a replay.

        Returns:
            The report of the round; None if no arrivals wait, or if `late` and they have not waited long enough.
        """
        op = "end_pass" if ends_pass else "flush" if batch is None else "step"
        prepared: Round | None = None

        def attempt() -> tuple[Report | None] | None:
            nonlocal prepared
            if prepared is None:
                self._check_open(op)
                self.check_storage()
                if self.admission.round is not None:
                    return None
                draft = self.admission if batch is None else batch.decided()
                makes = draft.filled and not (late and not draft.late)
                if makes and self._full:
                    if not self.make_room():
                        return None
                    draft = self.admission if batch is None else batch.decided()  # as bases of tasks were given up
                decided = self._prepared(op, draft.arrivals(), draft, ends_pass=ends_pass) if makes else None
                if batch is not None:
                    batch.sweep(decided)
                if decided is not None or (ends_pass and draft.entered):
                    kind: Literal["flush", "end_pass"] = "end_pass" if ends_pass else "flush"
                    draft.cut(kind, decided, joins if batch is None else batch.held_back)
                # Whoever comes after an interrupt publishes a round that is finished.
                finished = decided is not None and decided.finished
                self.mutex.handed_out |= finished
                if batch is not None:
                    batch.adopt(draft)
                if decided is None:
                    return (None,)
                prepared = decided
                if finished:
                    self.mutex.handed_out = self._publish()
                    if self._bells:
                        self._wake()
            return (prepared.report,) if self._has_ended(op, prepared) else None

        try:
            outcome = self.wait_for(attempt)
            if prepared is not None and self.norm_watch is not None:
                self.norm_watch.see(prepared.report)
            prepared = batch = None  # the round holds versions of params, and on_step may take long
            self.report_steps()
            return None if outcome is None else outcome[0]
        finally:
            prepared = batch = self = None  # type: ignore[assignment]  # errors that are kept keep closures

    def report_steps(self) -> None:
        """Call on_step for the steps that were not reported yet. The caller must hold neither mutex nor slot."""
        if self._step_calls is not None and self.admission.unreported:
            self._step_calls.run()

    def replace_rule(self, rule: Rule, max_slots: int) -> bool:
        """Replace the rule, and raise the limit of slots to `max_slots`. Return whether at once: no arrivals wait."""
        config = rule.to_config()
        at_once = self.when_idle("replace_rule", partial(self._replace_rule, rule, config, max_slots))
        self.notify_waiters()
        return at_once

    def _replace_rule(self, rule: Rule, config: dict[str, Any], max_slots: int) -> bool:
        self.grow(max_slots)
        return self.admission.set_rule(rule, rule.buffer_size, Replaced(config))

    def grow(self, max_slots: int) -> None:
        """Raise the limit of slots to `max_slots`, if it is lower."""
        if pools := self.plane.grow(max_slots):
            self.admission.use_slots(pools)
        self.max_slots = max(self.max_slots, max_slots)

    def discard(self) -> int:
        """Remove the waiting arrivals; return their number."""

        def cut() -> list[PendingArrival]:
            admission = self.admission
            return admission.cut("discard", None) if admission.filled else []

        # The arrivals are released without the mutex: that may run any code.
        count = len(self.when_idle("discard", cut))
        self.notify_waiters()
        return count

    def _prepared(
        self, op: str, waiting: list[PendingArrival], draft: Admission | None = None, *, ends_pass: bool = False
    ) -> Round:
        """Return the round of these arrivals, after the decisions of the draft; an error changes nothing."""
        before = (draft or self.admission).before(len(waiting), self.slot_bytes, ends_pass=ends_pass)
        if self.noise is not None:
            before = replace(before, draw=partial(self._noise_with_nonce, self.noise, before.current.version + 1))
        decided = prepare(self.admission.rule, before, waiting, self.plane, op)
        decided.saved = self.storage is None
        return decided

    def _noise_with_nonce(self, noise: ops.Noise, version: int, weights: Weights) -> ops.Noise:
        return replace(noise, sigma=weights.noise, nonce=self.nonce_of(version), next=weights.next_noise)

    # Making

    def _next_job(self) -> Round | None:
        admission = self.admission
        decided = admission.round
        free = decided is not None and decided.driver is None and not (admission.closed or admission.failure)
        return decided if free else None

    def _run(self, job: Round) -> None:
        """Make and save the sweep of a round."""
        storage = None if job.saved else self.storage
        if storage is not None and not job.done:
            storage.prepare_sweep(job)
        job.make(self.plane)
        if storage is None or job.unsound:
            job.saved = True
        else:
            storage.save_round(job, self.admission)

    def _publish(self) -> bool:
        """Make the version of a finished round the newest one; return whether jobs are left. May be repeated."""
        admission = self.admission
        job = admission.round
        # The frames of the thread that makes it hold the version that the round has read.
        if job is None or not job.finished or job.driver is not None:
            return job is not None
        if job.unsound:
            self._fail(job)
            return False
        params, rule_vectors, new_rows = job.prepared.publish()
        if (rows := admission.rows) is not None and job.moves is not None:
            rows.commit(new_rows, job.moves)
        admission.commit(Pulled(params, job.report.version, job.buffers), rule_vectors, job)
        job.release()
        return False

    def _fail(self, job: Round) -> None:
        """Abandon a round that has written a non-finite value.

        After this the server can only be read, load a state, or be closed.
        """
        resume = "load_state_dict" if self.storage is None else f"Server.open({str(self.storage.path)!r})"
        params = "Its params are overwritten (inplace=True)" if self.inplace else "Its last params can be read"
        job.failure = (
            f"the step to version {job.report.version} wrote a value that is not finite: it was not published, and "
            f"the server takes nothing more. {params}; {resume} continues from a saved state"
        )
        self.admission.abandon_round(job.failure)
        job.release()

    def _at_rest(self) -> bool:
        admission = self.admission
        return admission.round is None and self.plane.slots_taken == admission.slots_held
