"""The vectors of a server in this process, on the host or on one GPU."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from math import inf
from typing import Any

import numpy as np
from msgspec import Struct, field

from afflux import ops
from afflux._engine import Buffer, Pool, PreparedPass, ingest
from afflux.aggregation.cache.rows import MemoryRows
from afflux.aggregation.cache.staging import NewRows
from afflux.aggregation.plane import Parts, PlaneOptions, RoundPlan, Slot, StoredPlane
from afflux.arrays.devices import HOST, Device
from afflux.arrays.gpu import device_of
from afflux.arrays.interop import first_beyond, on_host
from afflux.arrays.pools import Draft, Vector, Versions
from afflux.ops.errors import AffluxError
from afflux.ops.units import ITEM_BYTES
from afflux.rules.rule import Float64


class LocalRound(Struct, frozen=True, eq=False):
    """A prepared round of a `LocalPlane`."""

    plane: "LocalPlane"
    plan: RoundPlan
    draft: Draft
    sweep: ops.Pass
    rows: NewRows
    before: Mapping[str, Vector]  #: the rule vectors before the sweep
    rule_vectors: Mapping[str, Vector]  #: after the sweep
    checked: PreparedPass | None  #: the sweep for the engine; None on a GPU
    checksums: list[ops.Checksums] | None  #: of the vectors that the sweep has written, for a store; None: no store
    swept: list[bool] = field(default_factory=list)  #: not empty once a sweep with staged rows has been made

    def make(self, done: list[bool]) -> None:
        rows, swept = self.rows, done
        if rows.staging is not None:
            swept = self.swept
            if not swept:
                rows.staging.begin_sweep(rows)
        if rows.staging is None or not swept:
            threads, checked, checksums = self.plane.num_threads, self.checked, self.checksums
            ops.apply(self.sweep, num_threads=threads, done=swept, checksums=checksums, checked=checked)
        if rows.staging is not None:
            rows.staging.copy_back(rows)
            done.append(swept[0])

    def publish(self) -> tuple[Vector, Mapping[str, Vector], NewRows]:
        apart = self.plane.apart
        for name, spare in apart.items():
            if spare is self.rule_vectors.get(name):
                apart[name] = self.before[name]
        return self.plane.versions.finished(self.draft), self.rule_vectors, self.rows

    def release(self) -> None:
        self.plan.slots.clear()  # the sweep's own list
        if self.checked is not None:
            self.checked.release()


class LocalPlane(StoredPlane):
    """The vectors of a server as arrays of one device, which are their own handles."""

    versions: Versions
    #: Pools of the memory of pushed vectors, with their type: buffers of the engine, which NumPy can read (bfloat16 as
    #: uint16); on a GPU arrays of the device's library.
    slot_pools: tuple[Any, ...]

    def __init__(self, device: Device = HOST, num_threads: int = 1) -> None:
        """Hold nothing yet. `num_threads` are those of sweeps, until `allocate` sets them."""
        self.device = device
        self.num_threads = num_threads
        self.gpu, self.alone = (None if device is HOST else device.name), device.alone
        self.reads_in_place = device is HOST
        #: With a store: the memory into which a sweep writes new rule vectors; None: it updates them in place.
        self.spares: Callable[[Mapping[str, Vector]], Mapping[str, Vector]] | None = None

    def allocate(self, options: PlaneOptions) -> MemoryRows | None:
        """Prepare as `DataPlane.allocate`."""
        self.options, self.size, self.num_threads = options, options.size, options.num_threads
        self.use_versions(None)
        #: The memory into which a sweep writes rule vectors, by name, if it reads vectors that no push has checked.
        self.apart = defaultdict[str, Vector](partial(self.device.empty, self.size, options.dtype))
        self._most_slots, self.slot_pools = options.slots, (self._slot_pool(options.slots),)
        codec, pinned = options.codec, options.rows_on_host
        return None if codec is None else MemoryRows(self.size, codec, self.device, pinned=pinned)

    def use_versions(self, memory: Callable[[], Vector] | None) -> None:
        """Make versions from now on, without the earlier ones. `memory` allocates them; None: the device does."""
        options = self.options
        self.versions = Versions(
            options.size,
            options.max_versions,
            dtype=options.dtype,
            inplace=options.inplace,
            memory=memory,
            device=self.device,
        )

    def keep_in(self, memory: Callable[[], Vector], spares: Callable[[Any], Mapping[str, Vector]]) -> Versions:
        """Return versions in a store's `memory`: on the CPU those of this plane, else for copies of them.

        Sweeps write new rule vectors into `spares`.
        """
        self.spares = spares
        if self.gpu is None:
            self.use_versions(memory)
            return self.versions
        return Versions(self.size, None, dtype=self.options.dtype, memory=memory)

    def _slot_pool(self, limit: int) -> Any:
        """Return a pool of slots, of which at most `limit` are in use at once; 0: any number."""
        options = self.options
        # Callers' vectors are read and slots are written: at most M of both between a push and its round.
        until_read = min(2 * options.together * self.size * ITEM_BYTES[options.slot_dtype], 2**62)
        return self.device.pool(self.size, options.slot_dtype, limit, until_read)

    def reserve(self, *, counted: bool = True) -> Any:
        if not counted:
            return self.device.take(self._slot_pool(0))
        for pool in self.slot_pools:
            try:
                return self.device.take(pool)
            except AffluxError:
                continue
        return None

    def grow(self, limit: int) -> tuple[Any, ...]:
        if limit > self._most_slots:
            self.slot_pools = (*self.slot_pools, self._slot_pool(limit - self._most_slots))
            self._most_slots = limit
        return self.slot_pools if self.device is HOST else ()

    @property
    def slots_taken(self) -> int:
        return sum(int(pool.held) for pool in self.slot_pools)

    def ingest(
        self,
        parts: Parts,
        vector: Any,
        num_threads: int,
        conversion: ops.Conversion | None = None,
        beside: Any = None,
    ) -> ops.Ingested:
        # As `ops.ingest`, but without its function calls and without Ingested.__new__, because calls slow pushes of
        # short vectors.
        first, squares, low, high = ingest(parts, vector, num_threads, conversion, beside)
        return tuple.__new__(ops.Ingested, (None if first < 0 else first, squares, low, high))

    def first_beyond(self, vector: Any, most: float) -> int | None:
        return first_beyond(vector, most)

    @cached_property
    def _sums(self) -> Pool:
        return Pool(self.size, "float64", 0)

    @cached_property
    def _zeros(self) -> Float64:
        return np.zeros(self.size)  # never written: the system may map all of it to one page of zeros

    def total(self, values: Float64 | None = None) -> Any:
        # On a GPU a sum is filled with zeros when it is made.
        total = Buffer(self._sums) if self.device is HOST else self.device.full(self.size, 0.0, "float64")
        if values is not None:
            self.device.fill(total, values)
        return total

    def add(self, total: Any, slot: Slot, weight: float, *, first: bool, done: list[Any]) -> None:
        if not done:
            before = self._zeros if first and self.device is HOST else total
            sweep = ops.Pass(before, total, ops.Combine([slot], np.array([weight])))
            ops.apply(sweep, num_threads=self.num_threads, done=done)

    def gram(self, vectors: Sequence[Any]) -> Float64:
        return ops.gram(vectors, num_threads=self.num_threads)

    def inner(
        self, slots: Sequence[Slot], weights: Float64 | None, memory: Vector | None, shift: float, own_weight: float
    ) -> ops.InnerProducts:
        threads = self.num_threads
        return ops.inner(slots, weights, memory=memory, shift=shift, memory_weight=own_weight, num_threads=threads)

    def prepare(
        self,
        plan: RoundPlan,
        params: Vector,
        rule_vectors: Mapping[str, Vector],
        rows: Any,
        op: str,
        draft: Draft = None,
    ) -> LocalRound:
        """Prepare as `DataPlane.prepare`. `draft` is the memory of the version; None: the next free one."""
        draft = self.versions.take(op) if draft is None else draft
        vectors = after = rule_vectors
        spares = self.apart if vectors and plan.most < inf else vectors
        if (spares := spares if self.spares is None else self.spares(vectors)) is not vectors:
            after = _renewed(plan, vectors, spares)
        cache, memory, new_rows = None, None, _NO_ROWS
        if plan.rows is not None:
            cache, new_rows = rows.prepare(plan.rows)
        states = [vectors[name] for name in plan.states]
        outs = [] if after is vectors else [after[name] for name in plan.states]
        if names := plan.rule_vectors:
            coefficients = np.array(plan.coefficients or [0.0] * len(names))
            new = [] if after is vectors else [after[name] for name in names]
            memory = ops.RuleVectors([vectors[name] for name in names], coefficients, plan.next, new)
        mix = ops.Combine(plan.slots, plan.weights, plan.params_weight, plan.most, plan.trim, plan.noise)
        sweep = ops.Pass(params, draft, mix, cache, plan.step, states, memory, outs)
        checked = None if self.gpu else ops.check(sweep)
        checksums: list[ops.Checksums] | None = None if self.spares is None or self.gpu else []
        return LocalRound(self, plan, draft, sweep, new_rows, vectors, after, checked, checksums)

    def version(self, write: Callable[[Any], object], op: str) -> Vector:
        draft = self.versions.take(op)
        write(draft)
        return self.finished(draft)

    def finished(self, draft: Draft) -> Vector:
        """Return a version that has been written, for callers."""
        return self.versions.finished(draft)

    @property
    def versions_held(self) -> int:
        return self.versions.held

    def vector(self, values: "Float64 | float | None" = None) -> Vector:
        if values is None:
            return self.device.empty(self.size, self.options.dtype)
        if isinstance(values, np.ndarray):
            return self.device.moved(values)
        return self.device.full(self.size, values, self.options.dtype)

    def fill(self, vector: Any, values: Any) -> None:
        self.device.fill(vector, values)

    def shown(self, vector: Vector, *, copy: bool = False) -> ops.Array:
        return self.device.copy(vector) if copy else self.device.alias(vector)

    def read(self, vector: Any, *, copy: bool = True) -> Any:
        return on_host(vector, copy=copy)

    def owns(self, params: ops.Array) -> bool:
        """Return whether a caller's params, of a server on a GPU, are one of its versions."""
        return self.device.owns(params) and self.versions.has(params)

    def wait(self) -> None:
        self.device.wait()


_NO_ROWS = NewRows({})  #: never changed


def plane_like(subject: str, parts: Parts, names: Sequence[str]) -> LocalPlane:
    """Return a plane on the device of these arrays.

    Raises:
        AffluxError: the arrays are on several devices.
        UnavailableError: this build or machine does not support their device.
    """
    return LocalPlane(device_of(subject, parts, names))


def _renewed(plan: RoundPlan, before: Mapping[str, Vector], outs: Mapping[str, Vector]) -> Mapping[str, Vector]:
    """Return the rule vectors after a sweep that does not write in place: unchanged vectors keep their memory."""
    vectors = {**before, **{name: outs[name] for name in plan.states}}
    rows = [] if plan.next is None else plan.next.tolist()
    noise = None if plan.noise is None else plan.noise.next
    for s, (name, row) in enumerate(zip(plan.rule_vectors, rows, strict=False)):
        if any(value != (k == s) for k, value in enumerate(row)) or (noise is not None and noise[s] != 0):
            vectors[name] = outs[name]
    return vectors
