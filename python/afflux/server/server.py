"""The server: pull a version of params, push what was learned from it, and every M arrivals it takes one step."""

from collections.abc import Mapping
from math import nan
from os import PathLike
from types import MappingProxyType
from typing import Literal

import numpy as np

from afflux import ops
from afflux.aggregation.admission import Admission, Duplicates, ServerState
from afflux.aggregation.arrivals import Pushed
from afflux.aggregation.cache.memory import MemoryRows
from afflux.aggregation.options import (
    RowsOn,
    clients_of,
    codec_of,
    refuse_commits,
    refuse_places,
    refuse_starts,
    slots_of,
    why_not,
)
from afflux.aggregation.participation import Participation
from afflux.aggregation.reports import Pulled, Receipt, Report
from afflux.aggregation.streaming import MOST_SQUARES, MemoryMode, Streaming
from afflux.arrays.devices import HOST
from afflux.arrays.gpu import device_of
from afflux.arrays.layout import Tree
from afflux.arrays.pools import Slot, Slots, Versions
from afflux.ops.errors import AffluxError
from afflux.ops.validation import NUMBERS, brief, integer, is_int, one_of, optional, path_of, plain_id
from afflux.rules.rule import ClientId, Rule
from afflux.server.aggregator import Rounds, Ticket
from afflux.server.inputs import InputAdapter
from afflux.server.persistence import Keep
from afflux.server.plan import fitted
from afflux.store.folder import Durability, Every, Store
from afflux.store.lock import promises_space


class Server(Keep):
    """The main entry point: params, versions, and a rule applied to every M arrivals.

    Args:
        rule: an aggregation rule, for example `afflux.rules.fedbuff(buffer_size=10)`.
        params: the initial model; copied. A flat vector (d,), or a torch module, state_dict, nested dict or list of
            arrays, which may then be pushed and pulled as such (see `Layout`). If all of it is on one GPU (torch's or
            CuPy's arrays), so is whatever the server keeps that grows with d, and what `pull` gives: docs/gpu.md.
        num_clients: N, needed by rules that cache rows, and by those that take every client once per pass.
        num_threads: threads of a server step, fewer for short vectors; all CPUs of this process by default.
        push_threads: threads of the sweep that takes a pushed vector in.
        dtype: of params, "float32" or "float64"; the sums inside are float64 in both cases.
        slot_dtype: of buffered arrivals: that of params, or "bfloat16", which halves the buffer and the main read
            and rounds each arrival to 8 bits of precision.
        duplicates: what a client's second arrival in one buffer does. "both" count (default of rules that cache
            nothing); "latest": the one from the newer version stays, in its place, and the count does not change
            (default of rules that cache rows); "reject": the first one stays.
        max_staleness: arrivals older than this are dropped and counted; None keeps all.
        quarantine: record updates with non-finite values in `quarantined` instead of raising; not those that are lent
            (push(copy=False)), which their round rejects.
        max_slots: at most so many copies of pushed vectors exist at once, those that are lent not among them; at least
            M, by default 2 M + the number of CPUs. Not for rules where arrivals wait for the next pass, which would
            never end if they took all slots.
        max_versions: at most so many versions of params exist at once, held by clients or being written; a step that
            would need one more raises, and loses nothing. At least 2; None: no limit.
        inplace: a step overwrites params, for models too large for two copies; pulls then copy, and wait for a step
            that is being made.
        check_versions: notice when a client has written to a version that it pulled, which torch and DLPack cannot be
            kept from: a step or a state that would be made of it raises, and for an older version the next call after
            the client has released it, once. Costs three more sweeps over params a step. On the CPU.
        log: keep every decision in `log`, for `afflux.replay`.
        memory: "buffered", or "streaming": an arrival is added to one float64 sum as soon as it joins, and its slot is
            free again. For rules whose weights are known on arrival (see below); max_slots is then at least 1, by
            default 1 + the number of CPUs, and duplicates are not "latest".
        store: a new folder, which holds all of the server's state from now on; `open` goes on with it. Not with
            inplace. See docs/store.md.
        durability: of what is committed there. "process", the default: it survives the end of this process, however
            that comes about; "power": also that of the machine.
        commit_every: versions that this divides are committed; None: only `checkpoint` and `close` commit.
        seed: of the random bits that quantized rows are made with, at least 0, in 64 bits.
        memory_budget: bytes; what `afflux.plan` counts never exceeds them: max_slots and max_versions, where they are
            not given, are chosen so. Refused if that cannot be. The log and what is quarantined are not counted; on a
            GPU nor is what lies on the host.
        rows_on: of a server on a GPU without a store, where the cached rows are kept: "device", or "host": in pinned
            memory there, from which the row of a client that pushes comes to the GPU.

    Memory, in bytes, with p and s the sizes of an element of params and of a slot (4 by default):

        2 p d    params and the version being written (p d if inplace), and p d for each older version that a caller
                 still holds; the memory of those that nobody holds is used again
        s M d    the buffer, if one thread pushes; at most s max_slots d; s d for each arrival that is deferred
        8 d      the sum of the rows, for rules that cache them, and for each client seen 4 d more (8 d, if slots are
                 float64), or what the rule's codec takes (`afflux.codecs`)
        p d      for each vector of `memories`
        8 d      the sum, if streaming, in place of the buffer, with s d for each push that is under way; 8 d more while
                 a round is applied, if other threads push

    Threads may push and pull as they like. A push takes its vector in outside any lock; under a short one it then
    joins, or fails without a trace. While a round is applied the next buffer fills; only the arrival that would
    complete it waits. Staleness counts the rounds that were complete at the join, applied or not: the log of joins
    determines every bit.

    Streaming, the direction v differs from the buffered one by at most 4 (M + 5) 2^-53 sum_i |w_i u_i| per element (for
    rules of kind `model` with |sum_i w_i params| in the sum), much less than what rounding params to float32 does; the
    rule's own weights, learning rate and all else that a report says are the same. The sum is made in the order of the
    joins: the bits are those of a replay, of any number of threads and any instruction set, but not those of permuted
    arrivals. A vector's norm must not exceed 1e150, and what underflows when a raw weight is multiplied is lost. An
    update costs one more sweep, over its slot and the sum.

    In a forked child the server is a copy of its own, if no other thread was pushing at the fork; else it raises, and
    on a GPU always.

    >>> from afflux.rules import fedbuff
    >>> server = Server(fedbuff(buffer_size=2), np.zeros(3, np.float32))
    >>> pulled = server.pull()
    >>> server.push("ann", np.full(3, 1.0, np.float32), version=pulled.version).status
    'joined'
    >>> server.push("bob", np.full(3, 3.0, np.float32), version=pulled.version).report.version
    1
    >>> server.params.tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(
        self,
        rule: Rule,
        params: "ops.Array | Tree",
        *,
        num_clients: int | None = None,
        num_threads: int | None = None,
        push_threads: int = 1,
        dtype: Literal["float32", "float64"] = "float32",
        slot_dtype: Literal["float32", "float64", "bfloat16"] | None = None,
        duplicates: Duplicates | None = None,
        max_staleness: int | None = None,
        quarantine: bool = False,
        max_slots: int | None = None,
        max_versions: int | None = None,
        inplace: bool = False,
        check_versions: bool = False,
        log: bool = False,
        memory: MemoryMode = "buffered",
        store: "str | PathLike[str] | None" = None,
        durability: Durability | None = None,
        commit_every: int | None = 1,
        seed: int = 0,
        memory_budget: int | None = None,
        rows_on: RowsOn = "device",
    ) -> None:
        if not isinstance(rule, Rule):
            raise AffluxError(f"[Server] rule is {brief(rule)}, must be a Rule such as afflux.rules.fedbuff()")
        optional(integer(1))("Server", "num_clients", num_clients)
        optional(integer(1))("Server", "num_threads", num_threads)
        optional(integer(1))("Server", "push_threads", push_threads)
        optional(integer(0))("Server", "max_staleness", max_staleness)
        one_of("buffered", "streaming")("Server", "memory", memory)
        optional(integer(rule.buffer_size if memory == "buffered" else 1))("Server", "max_slots", max_slots)
        optional(integer(2))("Server", "max_versions", max_versions)
        optional(integer(0))("Server", "seed", seed)
        refuse_commits("Server", durability, commit_every)
        if store is None and (durability is not None or commit_every != 1):
            what = "commit_every" if durability is None else "durability"
            raise AffluxError(f"[Server] {what}: without a store nothing is committed; give store=PATH")
        folder = None if store is None else path_of("Server", "store", store)
        one_of("float32", "float64")("Server", "dtype", dtype)
        self._dtype = dtype
        slot_dtype = slot_dtype or dtype
        one_of(dtype, "bfloat16")("Server", "slot_dtype", slot_dtype)
        refuse_starts(rule, dtype)
        duplicates = duplicates or ("latest" if rule.calibrate.cached else "both")
        one_of("latest", "both", "reject")("Server", "duplicates", duplicates)
        self.rule = rule
        self.num_threads = ops.threads(num_threads)
        self._quarantine = quarantine
        self._intake, parts = InputAdapter.of(params, rule.kind, push_threads)
        self._device = self._intake.device
        size = self._intake.size
        refuse_places(rule, rows_on, self._device, store=store is not None, check_versions=check_versions)
        if memory_budget is not None:
            max_slots, max_versions = fitted(
                memory_budget,
                rule,
                size,
                max_slots=max_slots,
                max_versions=max_versions,
                num_clients=num_clients,
                dtype=dtype,
                slot_dtype=slot_dtype,
                memory=memory,
                inplace=inplace,
                store=folder is not None and promises_space(folder),
                gpu=self._device is not HOST,
                rows_on=rows_on,
            )
        self._versions = Versions(
            size, max_versions, dtype=dtype, checked=check_versions, inplace=inplace, device=self._device
        )
        self._streaming = Streaming(rule, duplicates, size, self._device) if memory == "streaming" else None
        self._slots = Slots(size, slot_dtype, slots_of(rule, max_slots, memory), self._device)
        rows, codec = None, codec_of(rule, slot_dtype)
        if codec is not None or rule.needs.passes:
            num_clients = clients_of(rule, num_clients, duplicates)
            apart = rows_on == "host"
            rows = None if codec is None else MemoryRows(size, num_clients, codec, seed, self._device, apart=apart)

        draft = self._versions.take()
        bad = self._intake.ingest("[Server] params", parts, draft.buffer).first_nonfinite
        if bad is not None:
            raise AffluxError(f"[Server] params has a non-finite value at index {bad}{self._intake.place(bad)}")
        buffers = self._intake.buffers("[Server] params", params, params)
        book = ServerState(
            current=Pulled(self._versions.finished(draft, 0), 0, buffers),
            rows=rows,
            waiting=[],
            memories={name: self._device.full(size, first, dtype) for name, first in rule.memories.items()},
            scalars=MappingProxyType(dict(rule.needs.scalars)),
            passes=Participation.of(num_clients, [], []) if rule.needs.passes and num_clients else None,
        )
        copies = why_not(rule, inplace=inplace, streaming=self._streaming is not None)
        self._joins = Admission(rule, duplicates, max_staleness, log, book, copies)
        self._rounds = Rounds(
            rule, self.num_threads, self._versions, self._slots, self._joins, self._streaming, self._device
        )
        self._gate = self._rounds.gate
        self._store: Store | None = None
        #: Older versions that the last checkpoint has kept, by number.
        self.kept: Mapping[int, Pulled] = MappingProxyType({})
        if folder is not None:
            options = {
                "duplicates": duplicates,
                "max_staleness": max_staleness,
                "quarantine": quarantine,
                "max_slots": max_slots,
                "max_versions": max_versions,
                "check_versions": check_versions,
                "log": log,
                "memory": memory,
                "seed": seed,
            }
            if inplace:
                raise AffluxError("[Server] inplace: a store keeps the last version while the next one is written")
            self._make_store(folder, durability or "process", commit_every, options)

    @classmethod
    def open(
        cls,
        path: "str | PathLike[str]",
        rule: Rule | None = None,
        *,
        num_threads: int | None = None,
        push_threads: int = 1,
        durability: Durability | None = None,
        commit_every: Every = "as before",
        like: "ops.Array | None" = None,
    ) -> "Server":
        """A server that goes on from the last commit of a store, with the same bits.

        Args:
            path: the store's folder.
            rule: that of the server that was kept there; what else is changed, such as server_lr, changes the next
                bits. None: the one that it had last; one with a part of your own must be given.
            num_threads: see the class.
            push_threads: likewise.
            durability: likewise; None: as it was last.
            commit_every: likewise; "as before": as it was last. All else is as it was.
            like: an array of torch or CuPy on the GPU where the server shall live; None: on the CPU. Wherever it was
                before, the bits that follow are the same.

        Raises:
            UnavailableError: `like` is on a GPU that is not served, or the server was made with check_versions.
            StoreError: no store, another rule or none where one must be given, another process has it, or it is
                damaged; it stays as it is.

        >>> from tempfile import TemporaryDirectory
        >>> from afflux.rules import fedbuff
        >>> folder = TemporaryDirectory()
        >>> with Server(fedbuff(buffer_size=2), np.zeros(3), store=f"{folder.name}/store") as server:
        ...     server.push("ann", np.ones(3), version=0).durable
        1
        >>> with Server.open(f"{folder.name}/store") as server:
        ...     server.arrivals_waiting, server.push("bob", np.ones(3), version=0).version
        (1, 1)
        >>> folder.cleanup()
        """
        folder = path_of("open", "path", path)
        if not isinstance(rule, Rule | None):
            raise AffluxError(f"[open] rule is {brief(rule)}, must be a Rule such as afflux.rules.fedbuff()")
        refuse_commits("open", durability, 1 if commit_every == "as before" else commit_every)
        if not (like is None or hasattr(like, "__dlpack__")):
            raise AffluxError(f"[open] like is of type {type(like).__name__}, must be an array of torch or CuPy")
        device = HOST if like is None else device_of("[open] like", like, ["like"])
        store = Store(folder, ops.threads(num_threads), durability, commit_every, device)
        try:
            rule = store.going_on(rule)
            settings = {name: store.facts[name] for name in ("num_clients", "dtype", "slot_dtype")} | store.options
            zeros = device.full(store.facts["d"], 0.0, store.facts["dtype"])
            server = cls(rule, zeros, num_threads=num_threads, push_threads=push_threads, **settings)
            server._settle(store)
        except BaseException:
            store.close()
            raise
        return server

    def push(
        self,
        client_id: ClientId,
        vector: "ops.Array | Tree",
        *,
        version: int,
        num_examples: int = 1,
        loss: float = float("nan"),
        buffers: "Tree | None" = None,
        timeout: float | None = None,
        copy: bool = True,
    ) -> Receipt:
        """Hands in what a client learned; the M-th arrival makes the server step.

        Args:
            client_id: an int64 (NumPy's or Python's) or a str, not mixed in one server.
            vector: an update, a gradient or a model, as the rule's kind says: (d,) float32, float64, float16 or
                bfloat16, or a tree like the server's, whose arrays go straight into one slot.
            version: the version that the client pulled.
            num_examples: the client's number of training examples, at least 1.
            loss: its mean training loss, if known.
            buffers: the client's own values of the model's buffers, if it has some: a tree that holds them, or a flat
                float64 vector. Rules of kind `model` find them in `vector` if that is a tree.
            timeout: seconds to wait while all slots are taken (with a store a push keeps its slot while it waits for
                its row from the disk); None: as long as it takes, 0: not at all. The rule's
                own code (weigh, step) is waited for in any case.
            copy: False lends the vector: the round reads it where it lies, and until then (`version` has reached
                Receipt.step, or the buffer was discarded) it must not be changed, nor its memory resized, freed or
                moved (torch refuses to resize it; share_memory_ and torch's queues move it). It saves the copy and the
                slot; but nobody looks at the vector before the round: one with a non-finite value is then rejected
                (weight 0, the others' weights stay; Report.rejected says so), and its norm is NaN, in reports and for
                the rule: lend nothing to a rule of your own that reads `arrivals.norms` (no preset does; a NaN weight
                raises, but comparisons with NaN are silently false). For one contiguous vector of the slots' dtype, and
                rules that keep no vectors between rounds (FedBuff, FedAsync, ...).

        Raises:
            AffluxError: a wrong id, version, length, dtype or layout, or a non-finite value; nothing has changed.
            BusyError: all slots were taken for `timeout` seconds; nothing has changed.
            UnavailableError: a vector on a device that this build does not serve, or lent from another one than the
                server's; nothing has changed.

        A KeyboardInterrupt that comes during a step, or while an arrival is added up, is raised although the arrival
        has joined; the next call that needs the result finishes it. `counts` tells.
        """
        self._enter("push")
        ticket = Ticket()
        pushed: Pushed | None = None
        try:
            client_id = plain_id(client_id)
            version = self._plain_version(client_id, version)
            if not (is_int(num_examples) and 1 <= num_examples < 2**63):
                raise AffluxError(f"[push] num_examples is {num_examples!r}, must be an int of at least 1 in 64 bits")
            if not isinstance(loss, NUMBERS) or (isinstance(loss, int) and abs(loss) > 2**63):
                raise AffluxError(f"[push] loss is {loss!r}, must be a number (NaN if unknown)")
            if not (timeout is None or (isinstance(timeout, NUMBERS) and timeout >= 0)):
                raise AffluxError(f"[push] timeout is {timeout!r}, must be None or a number of seconds, at least 0")
            if not isinstance(copy, bool | np.bool_):
                raise AffluxError(f"[push] copy is {copy!r}, must be True or False")
            what = f"[push] client {client_id!r}'s"
            parts = self._intake.pushed(f"{what} vector", vector)
            own = self._intake.buffers(what, vector, buffers)
            rows, fetch = self._joins.book.rows, None
            bad, norm, extremes = None, nan, (nan, nan)
            if copy:
                ticket.slot = self._gate.take_slot(timeout)
                fetch = None if rows is None else rows.prefetch(client_id)
                bad, norm, extremes = self._copied(what, parts, ticket.slot)
            elif self._joins.copies is None:
                ticket.slot = self._intake.lent(f"{what} vector", parts, self._slots.dtype)
            else:
                raise AffluxError(f"{what} vector cannot be read in place (copy=False): {self._joins.copies}")
            if fetch is not None:  # the disk was read while the vector was copied
                ticket.stage = fetch()
            with self._gate.mutex:
                pushed = (client_id, version, int(num_examples), float(loss), norm, ticket.slot, own, extremes)
                return self._rounds.join(pushed, bad, ticket)
        except Exception:
            if not ticket.decided:
                with self._gate.mutex:
                    self._joins.refuse()
            raise
        finally:
            # A traceback that somebody keeps must not keep the slot.
            pushed = ticket.slot = ticket.stage = fetch = None
            self._gate.wake()

    def _copied(
        self, what: str, parts: "ops.Array | list[ops.Array]", slot: Slot
    ) -> tuple[int | None, float, tuple[float, float]]:
        """The sweep that takes a vector in: where it is not finite, if that is allowed, its norm, and min and max."""
        facts = self._intake.ingest(f"{what} vector", parts, slot)
        bad = facts.first_nonfinite
        if bad is not None and not self._quarantine:
            place = self._intake.place(bad)
            raise AffluxError(f"{what} {self.rule.kind} has a non-finite value at index {bad}{place}")
        if bad is None and facts.sum_of_squares > MOST_SQUARES and (self.rule.needs.gram or self._streaming):
            which = "inner products" if self.rule.needs.gram else "sums"
            raise AffluxError(f"{what} {self.rule.kind} has norm {facts.norm:.3g}: {which} would overflow")
        return bad, facts.norm, (facts.min, facts.max)

    def set_memory(self, name: str, vector: ops.Array) -> None:
        """Hands in a vector that the rule reads but does not make, such as Zeno++'s validation gradient.

        Args:
            name: one of `rule.needs.handed_in`.
            vector: (d,), as for `push`; copied.

        Raises:
            AffluxError: another name, a wrong length, dtype or layout, or a non-finite value; nothing has changed.

        >>> from afflux.rules import zenopp
        >>> server = Server(zenopp(server_lr=0.5), np.zeros(2))
        >>> server.set_memory("validation", np.array([3.0, 4.0]))
        >>> server.push(7, np.array([6.0, 8.0]), version=0).report.weights.tolist(), server.params.tolist()
        ([0.5], [-1.5, -2.0])
        """
        self._enter("set_memory")
        if name not in self.rule.needs.handed_in:
            known = ", ".join(self.rule.needs.handed_in) or "none"
            raise AffluxError(f"[set_memory] {name!r} is not handed in to {self.rule.name}; known: {known}")
        what = f"[set_memory] {name}"
        new = self._device.empty(self._intake.size, self._dtype)
        facts = self._intake.ingest(what, self._intake.parts(what, vector), new)
        bad = facts.first_nonfinite
        if bad is not None:
            raise AffluxError(f"{what} has a non-finite value at index {bad}{self._intake.place(bad)}")
        if facts.sum_of_squares > MOST_SQUARES:
            raise AffluxError(f"{what} has norm {facts.norm:.3g}: inner products would overflow")
        with self._gate.mutex:
            self._gate.settle()
            self._joins.hand_in({**self._joins.book.memories, name: new}, name)

    def flush(self) -> Report | None:
        """A step with the arrivals that wait, however few: the last, short buffer. None if there are none."""
        self._enter("flush")
        with self._gate.mutex:
            self._gate.settle()
            waiting = self._joins.book.arrivals()
            if not waiting:
                return None
            sealed = self._rounds.prepared("flush", waiting)
            self._joins.cut("flush", sealed)
            self._rounds.step(sealed)
            return sealed.report

    def discard(self) -> int:
        """Throws away the arrivals that wait, for example because the rule cannot weigh them; returns how many."""
        self._enter("discard")
        with self._gate.mutex:
            self._gate.settle()
            count = self._joins.book.filled + len(self._joins.book.deferred())
            if count:
                self._joins.cut("discard", None)
        self._gate.wake()
        return count

    def _plain_version(self, client_id: ClientId, version: object) -> int:
        if not is_int(version):
            raise AffluxError(f"[push] version is {version!r}, must be an int")
        if not 0 <= version <= self._joins.book.current.version:
            raise AffluxError(
                f"[push] client {client_id!r} says that it pulled version {version}; the server has made 0 to "
                f"{self._joins.book.current.version}"
            )
        return int(version)
