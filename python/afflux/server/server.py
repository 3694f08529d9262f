"""The server: clients pull params and push updates, and every M arrivals the server makes one step."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from os import PathLike
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self, Unpack, overload

from afflux import ops
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.options import Options, ServerOptions, options_of
from afflux.aggregation.plane import DataPlane
from afflux.aggregation.reports import Entry, Fault, Params, Pulled, Receipt, Report
from afflux.aggregation.state import ServerState
from afflux.arrays.layout import Layout, Tree
from afflux.arrays.roles import warn_of_means
from afflux.ops.errors import AffluxError
from afflux.ops.units import ITEM_BYTES
from afflux.ops.validation import MOST_COUNT, a_thread_count, brief, integer, is_function, optional, path_of, positive
from afflux.rules.rule import ClientId, Rule, a_rule
from afflux.server import persistence, versions
from afflux.server.assembly import RepeatedKey, assemble, noise_of
from afflux.server.checkout import Task, close_overdue, open_task
from afflux.server.inputs import InputAdapter
from afflux.server.pending_push import Ticket
from afflux.server.pushing import PushCall, receive, ticket_of
from afflux.server.step import Finished, make_step
from afflux.server.step_callbacks import OnStep
from afflux.server.tracebacks import clear_tracebacks, clears_tracebacks
from afflux.store.metadata import damage_as_store_error
from afflux.store.store import Store


class Server:
    """Holds the global model, takes updates from clients, and updates the model after every M of them.

    Args:
        rule: an aggregation rule, for example `afflux.rules.fedbuff(buffer_size=10)`.
        params: the initial model; copied. A flat vector (d,), or a torch module, state_dict, nested dict or list of
            arrays; clients may then push and pull such trees (see `Layout`). If all arrays are on one GPU (torch's or
            CuPy's), all vectors of the server and the result of `pull` are on this GPU: docs/guides/gpu.md.
        options: see `ServerOptions`.
        layout: the layout of a part of params, `Layout.of(params, select=...)`, if only this part is aggregated.
        store: a new folder for all of the server's state; `open_or_create` also opens an existing one.
        num_threads: threads of a server step, fewer for short vectors; by default all CPUs that this process may use.
        push_threads: threads of the sweep that copies a pushed vector.
        on_step: a function that is called with the `Report` of each step, after the step's version can be pulled, by
            the call that made the step. No lock is held: on_step may call the server. Calls are in the order of the
            steps and never overlap: if two threads make steps at about the same time, one thread may call for both. If
            on_step itself causes a step, the call for that step follows after on_step returns. An exception that
            on_step raises is logged (logger "afflux"), and no step is lost. A step that an interrupt has left
            unfinished is reported with the next step, or by `poll`.
        first_version: the number of the first version, for callers that count on; at most 2**52, which leaves as many
            numbers for later versions.
        noise_key: 32 secret random bytes, such as `secrets.token_bytes(32)`, for a rule that adds noise. The server
            never saves, logs or prints it. Each round draws a new nonce, which is in the log.
        plane: where the server's vectors are, if not in one piece on the device of params: a new
            `afflux.aggregation.sharded_plane.ShardedPlane`. Results are bit-identical; what callers get are copies.
        fields: fields of `ServerOptions`, instead of those in `options`: `Server(rule, params, log=True)`.

    Raises:
        AffluxError: an argument is wrong, or cannot be combined with another one or with the rule; nothing was written.

    Threads may push and pull at the same time. A push copies its vector without any lock. Then, under a short lock, it
    joins, or fails without a change of the state. While a round is applied the next buffer fills; only the arrival that
    would complete that buffer waits. Staleness counts the rounds that were complete at the join, applied or not.
    Therefore the log of joins determines every bit of the results. A forked child has its own copy, if no other thread
    was pushing at the fork. The child cannot use a server on a GPU or with a store: calls raise, except pulls if params
    are on the CPU.

    >>> import numpy as np
    >>> from afflux.rules import fedbuff
    >>> server = Server(fedbuff(buffer_size=2), np.zeros(3, np.float32))
    >>> pulled = server.pull()
    >>> server.push(client="ann", version=pulled, update=np.full(3, 1.0, np.float32)).status
    'joined'
    >>> server.push(client="bob", version=pulled, update=np.full(3, 3.0, np.float32)).report.version
    1
    >>> server.params.tolist()
    [2.0, 2.0, 2.0]
    """

    @clears_tracebacks
    def __init__(
        self,
        rule: Rule,
        params: "ops.Array | Tree",
        options: ServerOptions | None = None,
        *,
        layout: Layout | None = None,
        store: "str | PathLike[str] | None" = None,
        num_threads: int | None = None,
        push_threads: int = 1,
        on_step: OnStep | None = None,
        first_version: int = 0,
        noise_key: bytes | None = None,
        plane: DataPlane | None = None,
        **fields: Unpack[Options],
    ) -> None:
        a_rule("Server", "rule", rule)
        num_threads = optional(a_thread_count)("Server", "num_threads", num_threads)
        push_threads = a_thread_count("Server", "push_threads", push_threads)
        if not (on_step is None or is_function(on_step)):
            raise AffluxError(f"[Server] on_step is {brief(on_step)}, must be a function that takes a Report")
        first_version = integer(0, MOST_COUNT // 2)("Server", "first_version", first_version)
        options = options_of("Server", options, fields).for_rule(rule)
        folder = None if store is None else path_of("Server", "store", store)
        self._adapter, parts = InputAdapter.of(params, rule.kind, push_threads, layout, options.limits.max_abs)
        if self._adapter.layout is not None:
            warn_of_means(self._adapter.layout.unknown_statistics)
        if plane is not None:
            self._adapter = self._adapter.moved_to(plane)
        options = persistence.for_place(rule, self._adapter, options, folder)
        noise = noise_of(rule, noise_key, self._adapter)
        self.options = options  #: including the values that depend on the rule and the memory budget
        self.retained_versions: Mapping[int, Pulled] = {}  #: older versions that the last checkpoint has kept
        parts_of = rule, params, parts, self._adapter, options, num_threads, on_step
        self._aggregator = assemble(*parts_of, first_version)
        self._aggregator.noise = noise
        if isinstance(noise_key, RepeatedKey):
            self._aggregator.nonce_of = noise_key.nonce_of
        self._store: Store | None = None
        if folder is not None:
            self._store = persistence.make_store(self._aggregator, folder, self._adapter, options, num_threads)

    @classmethod
    @clears_tracebacks
    def open(
        cls,
        path: "str | PathLike[str]",
        rule: Rule | None = None,
        *,
        num_threads: int | None = None,
        push_threads: int = 1,
        like: "ops.Array | None" = None,
        on_step: OnStep | None = None,
        noise_key: bytes | None = None,
        plane: DataPlane | None = None,
        **fields: Unpack[Options],
    ) -> "Server":
        """Return a server that continues from the last commit of a store, bit for bit.

        Args:
            path: the store's folder.
            rule: the rule of the stored server, possibly with other parameters. It must be given if the stored rule has
                a part that is not registered. None: the stored rule.
            num_threads: see the class.
            push_threads: see the class.
            like: an array of torch or CuPy on the server's GPU; None: the server is on the CPU.
            on_step: see the class.
            noise_key: see the class; the same one, or another one.
            plane: for a store of a server in shards, a new `ShardedPlane` with the same shards.
            fields: fields of `ServerOptions`; one that is not given has its stored value, and so has durability=None.
                These may differ from the stored values: durability, commit_every, max_staleness, faults, max_slots,
                max_versions, flush_after, max_abs, max_norm, clip_norms (not with log=True), memory_budget. A warning
                says what changes, and from which version on; arrivals that wait are not checked again. The next commit
                stores the new values.

        Raises:
            UnavailableError: `like` is on an unsupported GPU.
            AffluxError: an argument has a wrong type or value, or cannot be combined with the stored options. Or one of
                the other options differs from the stored value; the message has both.
            StoreError: there is no store, the rule is wrong or missing, another process uses the store, its vectors are
                in other shards, or the store is damaged. The store does not change.

        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from afflux.rules import fedbuff
        >>> folder = TemporaryDirectory()
        >>> with Server(fedbuff(buffer_size=2), np.zeros(3), store=f"{folder.name}/store") as server:
        ...     server.push(client="ann", version=0, update=np.ones(3)).durable
        1
        >>> with Server.open(f"{folder.name}/store") as server:
        ...     server.arrivals_waiting, server.push(client="bob", version=0, update=np.ones(3)).version
        (1, 1)
        >>> folder.cleanup()
        """
        store = persistence.open_store(path, rule, num_threads, like, plane, fields)
        try:
            with persistence.errors_of_open(store.path):
                zeros, options = persistence.start_of(store)
                rule = store.resolve_rule(rule)
                options = persistence.replaced(store, rule, options, fields, gpu=like is not None)
                server = cls(
                    rule,
                    zeros,
                    options=replace(options, durability=None, commit_every=1),  # it has no store yet
                    num_threads=num_threads,
                    push_threads=push_threads,
                    on_step=on_step,
                    noise_key=noise_key,
                    plane=plane,
                )
                with damage_as_store_error(store.path):
                    opened = persistence.load_store(store, server._aggregator, server._adapter, options)
            server.options, server._store = options, store
            server._adapter, server.retained_versions = opened
        except BaseException:
            store.close()
            raise
        return server

    @classmethod
    @clears_tracebacks
    def open_or_create(
        cls,
        path: "str | PathLike[str]",
        rule: Rule,
        params: "ops.Array | Tree",
        *,
        layout: Layout | None = None,
        num_threads: int | None = None,
        push_threads: int = 1,
        on_step: OnStep | None = None,
        noise_key: bytes | None = None,
        plane: DataPlane | None = None,
        **fields: Unpack[Options],
    ) -> "Server":
        """Open the store at `path` if there is one, else create it: a program that is started again continues.

        Args:
            path: the store's folder.
            rule: the rule; if there is a store, it must have the same name, and may have other parameters: see `open`.
            params: the initial model. If there is a store, only names, shapes and roles of the arrays, their library
                and device are used: the values are those of the last commit.
            layout: see the class.
            num_threads: see the class.
            push_threads: see the class.
            on_step: see the class.
            noise_key: see the class.
            plane: see the class.
            fields: fields of `ServerOptions`. If there is a store, those that `open` cannot replace must agree with it.

        Returns:
            A server with a store. `task.tree()` returns arrays like those of params also if the server was opened.

        Raises:
            AffluxError: see the class and `open`.
            StoreError: the store has another rule or another model, another process uses it, or it is damaged; or the
                folder holds other files. Nothing changes.

        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from afflux.rules import fedbuff
        >>> folder, model = TemporaryDirectory(), {"w": np.zeros(3, np.float32)}
        >>> for start in range(2):
        ...     with Server.open_or_create(f"{folder.name}/store", fedbuff(buffer_size=1), model) as server:
        ...         server.push(client="ann", version=start, update={"w": np.ones(3)}).report.version
        1
        2
        >>> folder.cleanup()
        """
        rule, folder = a_rule("open_or_create", "rule", rule), path_of("open_or_create", "path", path)
        settings: Any = {"num_threads": num_threads, "push_threads": push_threads, "on_step": on_step, "plane": plane}
        settings["noise_key"] = noise_key
        facts = persistence.facts_in(folder)
        if facts is None:
            return cls(rule, params, layout=layout, store=folder, **settings, **fields)
        most = options_of("open_or_create", None, fields).for_rule(rule).limits.max_abs
        adapter, parts = InputAdapter.of(params, rule.kind, 1, layout, most)
        persistence.check_model(folder, facts, adapter)
        if adapter.plane.gpu is not None:
            settings["like"] = parts[0] if isinstance(parts, list) else parts
        server = cls.open(folder, rule, **settings, **fields)
        server._adapter = persistence.like_params(server._adapter, adapter)
        return server

    def push(
        self,
        *,
        task: "Task | str | None" = None,
        client: ClientId | None = None,
        version: "int | Pulled | None" = None,
        staleness: int | None = None,
        update: "ops.Array | Tree" = None,
        gradient: "ops.Array | Tree" = None,
        model: "ops.Array | Tree" = None,
        num_examples: int = 1,
        loss: float | None = None,
        facts: Mapping[str, float] | None = None,
        client_lr: float | None = None,
        local_steps: int | None = None,
        buffers: "Tree | None" = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Send a client's update, gradient or model to the server; the M-th one updates the global model.

        A client sends one of these three vectors. The sweep that copies the vector converts it to the kind that the
        rule takes:

            update = model - base,  model = base + update
            gradient = -update / (client_lr local_steps), and back

        in float64, rounded once to the dtype of the slots. The base is the version that the client pulled. Before the
        subtraction it is rounded to the dtype of each of the model's arrays that is narrower, because a bfloat16 client
        has received the rounded values.

        Args:
            task: the result of `checkout`, or its id, instead of `client` and `version`; the push closes it.
            client: the client's id: an int in 64 bits, signed or unsigned, or a str of at most 1,024 bytes in UTF-8.
            version: the version that the client pulled: the result of `pull`, or its number. Conversions from or to a
                model need its params: with a number, the version must be the newest one, or held for a task.
            staleness: instead of a version: the number of versions that were made since the client's, counted at the
                join. Conversions from or to a model need a version.
            update: local minus pulled params: (d,) float32, float64, float16 or bfloat16, or a tree like the server's,
                whose arrays are copied into one slot.
            gradient: in the same forms; it points in the direction of ascent.
            model: in the same forms, the client's own params; a torch module or its state_dict, for example.
            num_examples: the client's number of training examples; with 0 the push is not an arrival, and its receipt
                `empty`.
            loss: its mean training loss, a finite number; None: unknown.
            facts: further numbers of the client, finite, by the names that the rule needs or `Server(facts=...)` lists;
                None: none. Those that the rule needs must be there.
            client_lr: its learning rate, for conversions from or to a gradient.
            local_steps: its number of local steps, for the same conversions, and for the rule (`Arrivals.local_steps`).
            buffers: the client's values of the model's buffers: a tree that holds them, or a flat float64 vector. None:
                they are in `model`.
            timeout: seconds to wait while all slots are in use; None: no limit, 0: do not wait. A push waits for
                the rule's own code (weigh, step) in any case.

        Returns:
            The receipt of the push.

        Raises:
            AffluxError: a wrong id, version, length, dtype or layout, or a non-finite value (with faults="record" a
                receipt reports it instead); or arguments that cannot be combined. Nothing has changed.
            StoreError: the store cannot be read or written. The error's attribute `joined`, and its message, say
                whether the arrival has joined. If it has, it must not be pushed again.
            BusyError: all slots were in use for `timeout` seconds; nothing has changed.
            PlaneError: a process or GPU that holds vectors of the server has failed.
            UnavailableError: a vector on a device that this build does not serve.

        A KeyboardInterrupt during a step, or while an arrival is added to a sum, is raised although the arrival has
        joined (see `counts`). The next call that needs the result finishes the work.

        Cost: one sweep, which reads the vector, and the base if one is needed, and writes a slot. (With a server on a
        GPU, a vector on the host and a base, the base is copied to the host first; with inplace and a version's number,
        the base is copied after a round in progress.)

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server = Server(rules.fedasync(alpha=0.5), np.zeros(2, np.float32))  # which mixes models
        >>> pulled = server.pull()
        >>> server.push(client=7, version=pulled, update=np.array([2.0, 4.0])).status, server.params.tolist()
        ('joined', [1.0, 2.0])
        """
        aggregator, adapter = self._aggregator, self._adapter
        details = call = result = None
        decided: list[Receipt | None] = [None]  # the receipt, as soon as the push has joined
        try:
            if (
                (client_lr is None and local_steps is None and facts is None and buffers is None)
                and (timeout is None and staleness is None)
                and (adapter.layout is None or not adapter.layout.apart)
            ):
                result = aggregator.admission.push(
                    task, client, version, update, gradient, model, num_examples, loss, decided
                )
                if type(result) is Receipt:
                    return result
            if result is None:  # else the vector is in its slot, and the result has the facts of the push
                aggregator.enter("push")
                details = client_lr, local_steps, buffers, timeout, staleness
                call = PushCall(task, client, version, update, gradient, model, num_examples, loss, facts, *details)
            if aggregator.admission.next_deadline != inf:
                close_overdue(aggregator)
            ticket = Ticket(call) if result is None else ticket_of(aggregator.admission, result)
        except BaseException as error:
            task = version = update = gradient = model = buffers = details = call = result = None
            clear_tracebacks(error)
            if isinstance(error, Exception) and decided[0] is None:
                aggregator.count_refused()
            del self, aggregator, adapter
            raise
        # This frame, which a stored traceback keeps, may hold neither the server, the slot, versions nor the vector.
        task = version = update = gradient = model = buffers = details = call = result = None
        try:
            return receive(aggregator, adapter, ticket)
        finally:
            del self, aggregator, adapter, ticket

    @clears_tracebacks
    def step(
        self, pushes: "Iterable[Finished]", out: "ops.Array | Tree | None" = None
    ) -> tuple[tuple[Receipt, ...], Report | None]:
        """Update the model now, from these finished clients and all waiting ones, however many there are.

        The result is that of these pushes to a server with rounds="flush", and then of `flush`: the same params,
        receipts, log and states. But the pushes and the round are one decision: if a push raises an error, or the round
        cannot be made, nothing has changed. With faults="record" the faulty pushes get their receipts, and the others
        make the round.

        Args:
            pushes: for each a tuple (client, version, vector), with a vector of the rule's kind, or a dict of arguments
                of `push`, without timeout. Each vector has memory of its own. No other thread may write to the vectors
                before the call returns. The round reads them where they are, without a copy, unless params are
                on a GPU or in shards, or the rule or an option needs them first: inplace, accumulate, max_norm,
                clip_norms, cached rows, norms, inner products, a store that does not commit every version of a
                rule with vectors. Norms of vectors that are not copied are NaN in the report.
            out: a flat vector or a tree like the server's, into which params (and buffers) are then copied.

        Returns:
            The receipts, in the order of the pushes, and the report of the round; None if no arrival was left for it.

        Raises:
            AffluxError: as `push` and `flush`. Or `out` cannot hold a value of the new version: the round is made.
            StoreError: as `push`.

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server, mine = Server(rules.fedavg(), {"w": np.zeros(2, np.float32)}), {"w": np.empty(2, np.float32)}
        >>> updates = [("ann", 0, {"w": np.ones(2)}), {"client": "bob", "version": 0, "model": {"w": np.full(2, 3.0)}}]
        >>> receipts, report = server.step(updates, out=mine)
        >>> [receipt.status for receipt in receipts], report.version, mine["w"].tolist()
        (['joined', 'joined'], 1, [2.0, 2.0])
        """
        try:
            return make_step(self._aggregator, self._adapter, self.options, pushes, out)
        finally:
            del self, pushes, out  # an error that a rule's part has caught and kept keeps this frame

    @overload
    def pull(self) -> Pulled: ...
    @overload
    def pull(self, *, out: "ops.Array | Tree") -> int: ...
    def pull(self, *, out: "ops.Array | Tree | None" = None) -> Pulled | int:
        """Return the newest params and their version.

        A pull never waits for a step or a weigh part of another thread, unless inplace.

        Without `out` nothing is copied, unless inplace or in shards. With `out`, a flat vector or a tree like the
        server's, params (and buffers) are copied into `out`, and only the version is returned.

        Raises:
            AffluxError: as `Layout.load`, or a value is not finite in the dtype of its array; nothing is written.

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server = Server(rules.fedbuff(), {"weight": np.ones((2, 2), np.float32), "bias": np.zeros(2, np.float32)})
        >>> mine = {"weight": np.empty((2, 2), np.float32), "bias": np.empty(2, np.float32)}
        >>> server.pull(out=mine), mine["weight"].tolist()
        (0, [[1.0, 1.0], [1.0, 1.0]])
        """
        aggregator, adapter = self._aggregator, self._adapter
        try:
            if self.options.inplace:
                self._aggregator.enter("pull")
            if out is None:
                return versions.newest(aggregator)
            return versions.copied(aggregator, partial(adapter.copy_out, "pull", out=out))
        except BaseException as error:
            clear_tracebacks(error)
            raise
        finally:
            del self, aggregator, adapter, out  # an error that is kept keeps this frame

    @clears_tracebacks
    def replace_rule(self, rule: Rule) -> bool:
        """Replace the rule, for example by the same rule with another server_lr, buffer_size or staleness function.

        Arrivals in the buffer keep the rule under which they joined. The new rule is in force from the next empty
        buffer on. The state that the server keeps for its rule (moments, cached rows, numbers) does not change. The log
        gets an entry `Replaced`. The next commit to a store contains the new rule, even if the rule is not yet in
        force; if the rule has a part that is not registered, `open` will need it. Other threads may push at the same
        time.

        Args:
            rule: a rule with the name, the kind and the codec of the previous rule, and the same names of rule vectors,
                scalars and vectors that the user sets. The new rule must need norms, inner products and noise, and take
                each client once per pass, each if and only if the previous rule does.

        Returns:
            Whether the new rule is already in force, because the buffer was empty.

        Raises:
            AffluxError: the rule differs in one of these properties, or an option of the server (max_slots,
                num_clients, memory_budget) cannot be combined with it; nothing has changed.

        Without `max_slots` the number of slots grows with buffer_size, but is never reduced.

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server = Server(rules.fedbuff(buffer_size=2), np.zeros(2, np.float32))
        >>> receipt = server.push(client=1, version=0, update=np.ones(2))
        >>> server.replace_rule(rules.fedbuff(buffer_size=1, server_lr=0.5)), server.rule.buffer_size
        (False, 2)
        >>> receipt = server.push(client=2, version=0, update=np.ones(2))
        >>> server.rule.buffer_size, server.params.tolist()
        (1, [1.0, 1.0])
        """
        self._aggregator.enter("replace_rule")
        a_rule("replace_rule", "rule", rule)
        aggregator = self._aggregator
        try:
            options = self.options.for_replacement(aggregator.rule, rule)
            folder = None if aggregator.storage is None else aggregator.storage.path
            persistence.for_place(rule, self._adapter, options, folder)
        except AffluxError as error:
            raise AffluxError(f"[replace_rule] {str(error).removeprefix('[Server] ')}") from None
        return aggregator.replace_rule(rule, options.slots_of(rule))

    @clears_tracebacks
    def checkout(self, client: ClientId, *, lease: float | None = None, hold: bool = True) -> Task:
        """Open a task: a client trains from the newest version.

        A push closes the task, and so do `Task.cancel` and the end of its lease. A client may have several tasks.

        Args:
            client: the client's id.
            lease: seconds after which the task is closed, so that a later push is `expired`; None: no limit. The
                next call of `push`, `checkout`, `tasks`, `poll` and others closes tasks whose lease has ended.
            hold: whether the server holds the version's params while the task is open, for conversions from and to
                models. The server releases them when the version's staleness exceeds max_staleness, or when
                max_versions (default 64) versions are held, the oldest first. After that a push that needs them is
                `expired`; other pushes are not affected. With False the params exist as long as the version is the
                newest one. A server with inplace=True holds no versions and needs hold=False; the task then has its own
                copy.

        Raises:
            AffluxError: an argument has a wrong type or value.
            BlockedError: the client has entered in this pass of gradient scheduling (GSGM), or was in as many rounds
                as the rule allows.

        Cost: no array is copied, except with inplace; `Task.params` is a copy if the vectors are in shards.

        With a store, `checkpoint` keeps the open tasks, and the versions that are held for them.

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server = Server(rules.fedavg(), np.zeros(2))
        >>> task = server.checkout(7, lease=600)
        >>> task.version, task.params.tolist(), [other.client for other in server.tasks]
        (0, [0.0, 0.0], [7])
        >>> task.cancel(), server.push(task=task.id, update=np.ones(2)).status
        (True, 'expired')
        """
        self._enter_on_time("checkout")
        return open_task(self._aggregator, self._adapter, client, lease, hold)

    @clears_tracebacks
    def handle(self, *, timeout: float = 60.0) -> Any:
        """Return an `afflux.distributed.ServerHandle` for tasks and actors of Ray, to which it can be sent.

        Args:
            timeout: seconds after which the server gives up a push whose slices have not all come, or a pull that was
                not read. Its slot, or version, is then free again.

        Raises:
            UnavailableError: the server has no plane=RayPlane, or it has inplace.
        """
        self._aggregator.enter("handle")
        return self._aggregator.plane.handle(self, positive("handle", "timeout", timeout))

    @property
    def rule(self) -> Rule:
        """The rule in force: the rule of the arrivals in the buffer."""
        return self._aggregator.rule

    @property
    @clears_tracebacks
    def tasks(self) -> tuple[Task, ...]:
        """The open tasks, oldest first."""
        self._enter_on_time("tasks")
        aggregator, adapter = self._aggregator, self._adapter
        opened = aggregator.locked(aggregator.admission.opened_tasks)
        return tuple([Task(task, None, aggregator, adapter) for task in opened])

    @clears_tracebacks
    def poll(self) -> Report | None:
        """Close the tasks whose lease has ended, and take a step if arrivals have waited longer than `flush_after`.

        Returns:
            The report of that step; None if no step was due.
        """
        self._aggregator.enter("poll")
        close_overdue(self._aggregator)
        return self._aggregator.flush(late=True)

    @clears_tracebacks
    def set_rule_vector(self, name: str, vector: ops.Array) -> None:
        """Set a vector that the rule reads but does not compute, such as Zeno++'s validation gradient.

        Args:
            name: one of `rule.needs.handed_in`.
            vector: (d,) or a tree, as an update or gradient of `push`; copied.

        Raises:
            AffluxError: an unknown name, a wrong length, dtype or layout, a non-finite value, or a module, which holds
                params; nothing has changed.

        >>> import numpy as np
        >>> from afflux.rules import zenopp
        >>> server = Server(zenopp(server_lr=0.5), np.zeros(2))
        >>> server.set_rule_vector("validation", np.array([3.0, 4.0]))
        >>> receipt = server.push(client=7, version=0, gradient=np.array([6.0, 8.0]))
        >>> receipt.report.weights.tolist(), server.params.tolist()
        ([0.5], [-1.5, -2.0])
        """
        self._aggregator.enter("set_rule_vector")
        aggregator = self._aggregator
        new = self._adapter.rule_vector(aggregator.rule, name, vector, aggregator.admission.limits)
        aggregator.hand_in(name, new)

    @clears_tracebacks
    def set_params(self, params: "ops.Array | Tree") -> int:
        """Make a version with other params, for example those of another optimizer; return its number.

        The state of the rule and open tasks stay as they are. The log gets an entry `NewParams`. A store has the
        version in its next commit, which follows at once unless commit_every is None.

        Args:
            params: (d,), or a tree like the server's, with its buffers; copied. A flat vector leaves buffers unchanged.

        Raises:
            AffluxError: arrivals wait in the buffer; params have another length, shape or dtype, or a value that the
                constructor rejects; max_versions versions are held. Nothing has changed.
            StoreError: the commit has failed; the version exists.

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server = Server(rules.fedavg(), np.zeros(2))
        >>> server.set_params(np.ones(2)), server.params.tolist()
        (1, [1.0, 1.0])
        """
        self._aggregator.enter("set_params")
        aggregator, store = self._aggregator, self._store
        vector, buffers = self._adapter.new_params(params, aggregator.admission.limits)
        return aggregator.set_params(
            vector, buffers, lambda: None if store is None else persistence.commit(store, aggregator)
        )

    @clears_tracebacks
    def flush(self) -> Report | None:
        """Take a step with the waiting arrivals, however few, and return its report; None if no arrivals wait."""
        self._aggregator.enter("flush")
        return self._aggregator.flush()

    @clears_tracebacks
    def end_pass(self) -> Report | None:
        """End a pass of gradient scheduling (GSGM) whose other clients never come; all clients may enter again.

        The waiting arrivals make the last round of the pass, as at its own end. If there are none, no round is made,
        and the rounds of the pass count as the first ones of the next pass.

        Returns:
            The report of the round; None if no arrivals wait.

        Raises:
            AffluxError: the rule knows no passes; or as `flush`.

        >>> import numpy as np
        >>> from afflux import Server, rules
        >>> server = Server(rules.gsgm(buffer_size=2), np.zeros(2), num_clients=9)
        >>> task = server.checkout("ann")
        >>> server.push(task=task, gradient=np.ones(2)).status
        'joined'
        >>> server.push(client="ann", version=0, gradient=np.ones(2)).reason
        'has entered in this pass'
        >>> server.end_pass().client_ids, server.checkout("ann").version
        (('ann',), 1)
        """
        self._aggregator.enter("end_pass")
        if not self.rule.needs.passes:
            raise AffluxError(f"[end_pass] {self.rule.name} takes clients as they come: there is no pass to end")
        return self._aggregator.flush(ends_pass=True)

    @clears_tracebacks
    def discard(self) -> int:
        """Remove the waiting arrivals, for example because the rule cannot weight them. Return their number.

        In a pass of gradient scheduling (GSGM), their clients may enter again.
        """
        self._aggregator.enter("discard")
        return self._aggregator.discard()

    @property
    def version(self) -> int:
        """The number of server steps done so far."""
        return self._aggregator.admission.version

    @property
    @clears_tracebacks
    def params(self) -> Params:
        """The newest params, (d,), read-only; a copy if inplace."""
        return self.pull().params

    @property
    def layout(self) -> Layout | None:
        """The places of the model's arrays in the flat vector; None for a server that was made with a flat vector."""
        return self._adapter.layout

    @property
    @clears_tracebacks
    def constants(self) -> dict[str, Any]:
        """Copies of the model's constants and local arrays, by name, in the library of the first params."""
        return dict(self._adapter.constants.items(writable=True))

    @property
    def arrivals_waiting(self) -> int:
        """The number of arrivals in the buffer, fewer than M."""
        return self._aggregator.admission.filled

    @property
    def waiting(self) -> dict[int, ClientId]:
        """The clients of the arrivals that no round has used yet, by `Receipt.join`."""
        return {arrival.join: arrival.client_id for arrival in self._aggregator.admission.state.waiting}

    @property
    def joins(self) -> int:
        """The number of decisions about pushes so far, which is also the number of the next decision.

        After `open`: the number of decisions in the commit.
        """
        return self._aggregator.admission.number

    @property
    def counts(self) -> dict[str, int]:
        """The number of pushes by Status, and `refused`: those that raised an error. Each push counts once.

        A push is not counted in a forked child that cannot use the server.
        """
        return self._aggregator.admission.counts

    @property
    def counts_since_round(self) -> dict[str, int]:
        """The number of pushes by status, as in `counts`, since the last round was decided.

        It starts again from zero when a state is loaded or a store is opened. If 10 M of these arrivals have not filled
        the buffer any further (`replaced`, `superseded`, `rejected`, `dropped`), one warning is logged, with the
        numbers and the cause (logger "afflux").
        """
        return self._aggregator.admission.counts_since_round

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The newest 1000 faulty pushes, oldest first, if the server was made with faults="record"."""
        return self._aggregator.admission.faults

    @property
    @clears_tracebacks
    def log(self) -> tuple[Entry, ...]:
        """All decisions so far, if the server was made with log=True.

        Raises:
            AffluxError: the server keeps no log.
        """
        return tuple(self._aggregator.admission.entries())

    @property
    def versions_held(self) -> int:
        """The number of versions of params that exist now, including the newest one."""
        return self._aggregator.plane.versions_held

    @property
    @clears_tracebacks
    def rows(self) -> RowCache | None:
        """The cached rows, for rules that have them. Waits for a step in progress.

        Later steps change the rows: a row that is read during the step that replaces it may be partly the new one.
        """
        self._enter_on_time("rows")
        admission = self._aggregator.admission
        return self._aggregator.when_idle("rows", lambda: admission.rows)

    @property
    @clears_tracebacks
    def clients(self) -> set[ClientId]:
        """The clients with a stored vector, and those that have entered in the current pass, or in a round, if the rule
        limits participations.

        Waits for a step in progress.
        """
        self._enter_on_time("clients")
        state: ServerState = self._aggregator.when_idle("clients", lambda: self._aggregator.admission.state)
        clients = set[ClientId](() if state.rows is None else state.rows.client_ids)
        if (participation := state.participation) is not None:
            clients.update(participation.order[: participation.entered])
        return clients

    @property
    def entered(self) -> set[ClientId]:
        """The clients that have entered in the current pass (GSGM), or were in as many rounds as the rule allows.

        `checkout` of these raises `BlockedError`, and their pushes are `rejected`.
        """
        return set(self._aggregator.admission.entered)

    @property
    @clears_tracebacks
    def rule_vectors(self) -> dict[str, ops.Array]:
        """Copies (d,) of the vectors that the rule keeps, by name. Waits for a step in progress."""
        self._enter_on_time("rule_vectors")
        admission, shown = self._aggregator.admission, self._aggregator.plane.shown
        return self._aggregator.when_idle(
            "rule_vectors", lambda: {name: shown(vector, copy=True) for name, vector in admission.rule_vectors.items()}
        )

    @property
    def scalars(self) -> dict[str, float]:
        """The rule's own numbers, such as WKAFL's stage, after the last finished step."""
        return dict(self._aggregator.admission.scalars)

    @property
    def state_bytes(self) -> int:
        """Bytes of params, M slots (or one slot and the sum), rule vectors, and the current rows.

        With rounds="flush", the slots are those of the waiting arrivals.
        """
        state, slot, size = self._aggregator.admission, self._aggregator.slot_bytes, self._aggregator.size
        count = state.filled if self.options.rounds == "flush" else state.rule.buffer_size
        buffered = count * slot
        if self.options.accumulate:
            buffered = slot + 8 * size
        vectors = (1 + len(state.rule_vectors)) * ITEM_BYTES[self.options.dtype] * size
        return vectors + buffered + (0 if state.rows is None else state.rows.nbytes)

    @clears_tracebacks
    def checkpoint(self, notes: object = None, *, keep: Iterable[Pulled] = ()) -> None:
        """Commit all decisions so far, including the waiting arrivals. This writes d elements for each waiting arrival.

        Args:
            notes: JSON-able data for the caller's own state; a server that opens the store has these as `notes`.
            keep: older versions that are still needed. They are `retained_versions` of this server, and of a server
                that opens the store.

        Raises:
            StoreError: the store cannot be written; the last commit does not change.
            AffluxError: the server has no store, `notes` is not JSON-able, or `keep` has a foreign version.
        """
        self._aggregator.enter("checkpoint")
        commit = partial(persistence.checkpoint, self._stored("checkpoint"), self._aggregator, notes, keep)
        self.retained_versions = MappingProxyType(self._aggregator.when_idle("checkpoint", commit))

    @clears_tracebacks
    def close(self, *, checkpoint: bool = True) -> None:
        """Close the store, after a last checkpoint. Pulled params do not change.

        Args:
            checkpoint: False leaves the store at its last commit; use it if files have vanished or the disk is full.
        """
        if not self._aggregator.admission.closed:
            self._aggregator.enter("close")
        persistence.close(self._stored("close"), self._aggregator, checkpoint=checkpoint)
        self._aggregator.report_steps()

    @property
    @clears_tracebacks
    def notes(self) -> object:
        """The notes of the last checkpoint."""
        self._aggregator.enter("notes")
        store = self._stored("notes")
        notes = self._aggregator.when_idle("notes", lambda: store.notes)
        return None if notes is None else json.loads(notes)

    def _stored(self, op: str) -> Store:
        if self._store is None:
            raise AffluxError(f"[{op}] this server has no store: make it with store=")
        return self._store

    def __enter__(self) -> Self:
        return self

    @clears_tracebacks
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self.close()

    @clears_tracebacks
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete state, as {"meta": JSON-able facts, "arrays": {name: array}}.

        A server with the same rule and options that loads it continues bit for bit. To save it in a file:
        np.savez(file, meta=json.dumps(state["meta"]), **state["arrays"]).
        """
        self._aggregator.enter("state_dict")
        save = partial(persistence.save_state, self._aggregator, self._adapter, self.options)
        return self._aggregator.when_idle("state_dict", save)

    @clears_tracebacks
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state_dict() of a server with the same rule and options.

        The waiting arrivals of this server are discarded, and open tasks are closed. Pulled versions do not change.
        Clients that train from a version that the loaded state does not have must pull again. A server that accumulates
        can load a buffered state, but not the reverse. The rule's name and kind, d, dtypes, number of clients, layout
        and the raw weights in a sum must agree, and buffer_size must exceed the number of waiting arrivals. Other
        options, such as server_lr, may differ; the results then differ, too. During the call memory holds the vectors
        of both states.

        Raises:
            AffluxError: the state is of another kind of server, or is damaged; nothing has changed.
        """
        self._aggregator.enter("load_state_dict")
        if self._store is not None:
            raise AffluxError("[load_state_dict] this server has a store: load the state into one without")
        load = partial(persistence.load_state, self._aggregator, state, self._adapter, self.options)
        self._aggregator.when_idle("load_state_dict", load, makes_version=True)
        self._aggregator.notify_waiters()

    def __del__(self) -> None:
        """Close the store of a server that was deleted without close(), as the end of the process would."""
        store = self.__dict__.get("_store")
        if store is not None and not self._aggregator.admission.closed:
            persistence.forget(store, self._aggregator)

    def __repr__(self) -> str:
        return (
            f"Server({self.rule.name}, d={self._adapter.size}, version={self.version}, "
            f"{self.arrivals_waiting} of {self.rule.buffer_size} arrivals)"
        )

    @clears_tracebacks
    def __reduce__(self) -> NoReturn:
        raise AffluxError("[Server] a server is not pickled: save its state_dict(). Copies: docs/guides/host.md")

    def _enter_on_time(self, op: str) -> None:
        """Enter a call; first close the tasks whose lease has ended."""
        self._aggregator.enter(op)
        close_overdue(self._aggregator)
