"""Estimates of the memory and disk use of a server, part by part, without making the server."""

import sys
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Unpack

from afflux._engine import SUPERBLOCK
from afflux.aggregation.options import Options, ServerOptions, codec_of, options_of
from afflux.ops import codecs
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.units import ITEM_BYTES, in_bytes
from afflux.ops.validation import MOST_COUNT, MOST_ELEMENTS, flag, integer
from afflux.rules.rule import Rule, a_rule
from afflux.store.shards import shapes_in


class Usage(NamedTuple):
    """The bytes of one part of a plan, and its description."""

    size: int
    what: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by part, after every client has pushed.

    Parts that grow without a bound are not counted: the log, and Python objects, about 100 bytes for each client.

    Memory, in bytes, with p and s the sizes of an element of params and of a slot (4 by default)::

        2 p d    params and the version being written (p d if inplace), and p d for each older version that a caller
                 still holds; the memory of released versions is used again
        s M d    the buffer, if one thread pushes; at most s max_slots d
        8 d      the sum of the rows, for rules that cache them, and for each client seen 4 d more (8 d, if slots are
                 float64), or what the rule's codec takes (`afflux.codecs`)
        p d      for each of `Server.rule_vectors`
        8 d      the sum, if accumulating, in place of the buffer, with s d for each push in progress, and
                 at most s max_slots d where several threads push; 8 d more while a round is applied, if others push
    """

    memory: dict[str, Usage]  #: between two rounds: `Server.state_bytes`; of a server on a GPU, memory of the GPU
    working: dict[str, Usage]  #: in addition during a round, and while several threads push
    disk: dict[str, Usage]  #: allocated in a store
    host: dict[str, Usage] = field(default_factory=dict)  #: pinned memory of a server on a GPU, if one thread pushes

    @property
    def memory_bytes(self) -> int:
        """The largest number of bytes in memory at once."""
        return sum(part.size for part in (*self.memory.values(), *self.working.values()))

    @property
    def disk_bytes(self) -> int:
        """The largest number of bytes on disk."""
        return sum(part.size for part in self.disk.values())


def plan(
    rule: Rule,
    d: int,
    options: ServerOptions | None = None,
    *,
    store: bool = False,
    gpu: bool = False,
    **fields: Unpack[Options],
) -> Plan:
    """Estimate memory and disk use of `Server(rule, params, options, ...)`.

    Without `max_versions`, only the newest version and the one being made are counted, and no versions that clients
    hold. In a store, params, rows and the rule's vectors are in files, which the system caches in memory as long as it
    has space.

    Args:
        rule: the aggregation rule.
        d: the number of elements of params.
        options: as for `Server`.
        store: whether the server has a store.
        gpu: whether params are on a GPU.
        fields: fields of `ServerOptions`, instead of those in `options`.

    Raises:
        AffluxError: as `Server`.

    >>> from afflux.rules import ca2fl
    >>> found = plan(ca2fl(buffer_size=10), 1000, num_clients=50)
    >>> {name: part.size for name, part in found.memory.items()}
    {'params': 4000, 'buffer': 40000, 'sum': 8000, 'rows': 200000}
    """
    a_rule("plan", "rule", rule)
    d = integer(0, MOST_ELEMENTS)("plan", "d", d)
    store, gpu = flag("plan", "store", store), flag("plan", "gpu", gpu)
    settings = options_of("plan", options, fields).for_rule(rule)
    settings.for_place(rule, "a GPU" if gpu else None, store=store)
    return _plan(rule, d, fitted(rule, d, settings, store=store, gpu=gpu), store=store, gpu=gpu)


def _plan(rule: Rule, d: int, settings: ServerOptions, *, store: bool, gpu: bool) -> Plan:
    """Return the plan for checked options."""
    dtype, slot_dtype, accumulate = settings.dtype, settings.slots_as, settings.accumulate
    max_versions = settings.max_versions
    size, slot = ITEM_BYTES[dtype] * d, ITEM_BYTES[slot_dtype] * d
    codec = codec_of(rule, slot_dtype)
    clients = (settings.num_clients or 0) if codec is not None or rule.needs.passes else 0
    waiting, most = rule.buffer_size, settings.slots_of(rule)
    parts, working = {"params": Usage(size, f"the newest version, d {dtype}")}, dict[str, Usage]()
    if accumulate:
        waiting = 1
        buffer = {"buffer": Usage(slot + 8 * d, f"a slot, d {slot_dtype}, and the sum, d float64")}
        working["next sum"] = Usage(8 * d, "of those who push while a round is applied, d float64")
    else:
        buffer = {"buffer": Usage(waiting * slot, f"M = {waiting} slots, d {slot_dtype} each")}
    if most < sys.maxsize and most > waiting:
        spare = most - waiting
        working["other slots"] = Usage(spare * slot, f"at most {spare} (max_slots), if others push meanwhile")
    if not settings.inplace:
        versions = (max_versions or 2) - 1
        working["next params"] = Usage(versions * size, f"the version being made, at most {versions} (max_versions)")
    host = dict[str, Usage]()
    if codec is not None:
        parts["sum"] = Usage(8 * d, "of the rows, d float64")
        row = codec.row_bytes(d)
        rows = Usage(clients * row, f"N = {clients:,} clients, {in_bytes(row)} each as {codec.name}{_loss(codec, d)}")
        if gpu and (store or settings.rows_on == "host"):
            working["staged rows"] = Usage(most * row, f"of those who push or wait, at most {most} (max_slots)")
            host["uploads" if store else "rows"] = Usage(row, "for each push at once") if store else rows
        elif not store:
            parts["rows"] = rows
    parts |= {name: Usage(size, f"of the rule, d {dtype}") for name in rule.rule_vectors}
    memory = {"params": parts.pop("params"), **buffer, **parts}
    if not store:
        return Plan(memory, working, {}, host)
    if gpu:
        return Plan(memory, working, _disk(rule, d, settings, clients, 2, "a checkpoint keeps"), host)
    working.pop("next params", None)
    versions = max_versions or (2 if settings.commit_every == 1 else 3)
    return Plan(buffer, working, _disk(rule, d, settings, clients, versions, "a client holds"))


def _disk(rule: Rule, d: int, settings: ServerOptions, clients: int, versions: int, holder: str) -> dict[str, Usage]:
    """Return the parts on disk. Each array has as many segments as its slots need.

    There is space for so many versions, and for each older one that a `holder` keeps.
    """
    commit_every, codec = settings.commit_every, codec_of(rule, settings.slots_as)
    facts = {"d": d, "num_clients": clients, "dtype": settings.dtype, "slot_dtype": settings.slots_as}
    shapes = shapes_in(facts, {"accumulate": settings.accumulate}, (), rule.rule_vectors, rule.buffer_size, codec)
    spare = clients if commit_every is None else min(clients, rule.buffer_size * commit_every)
    arrivals = 0 if settings.accumulate else 2 * (rule.buffer_size - 1)
    slots = {"params": versions, "rows": clients + spare, "arrivals": arrivals}
    contents = {
        "params": f"{versions} versions, and one for each older one that {holder}",
        "rows": f"N = {clients:,} clients, and {spare:,} spare{_loss(codec, d)}",
        "arrivals": "at most, by checkpoints amid a buffer",
    }
    disk = {}
    for name, shape in shapes.items():
        segments = -(-slots.get(name, 2) // shape.per_segment)
        content = contents.get(name, "what is committed, and what comes next")
        whole = f"; a segment has {shape.per_segment}" if segments * shape.per_segment > slots.get(name, 2) else ""
        disk[name] = Usage(segments * shape.segment_bytes, content + whole)
    blocks = 1 + -(-d // SUPERBLOCK) if "rows" in shapes else 0
    disk["index"] = Usage(65536 + clients * (32 + 4 * blocks), "about; and a journal of up to 41 MB while it is open")
    return disk


def _loss(codec: Codec | None, d: int) -> str:
    """Return a note if encoded rows of so few elements are larger than the vectors; else an empty text."""
    vector = codecs.float32.row_bytes(d)
    return f": more than float32, {in_bytes(vector)}" if codec and codec.keyed and codec.row_bytes(d) > vector else ""


def fitted(rule: Rule, d: int, options: ServerOptions, *, store: bool = False, gpu: bool = False) -> ServerOptions:
    """Return the options with max_slots and max_versions chosen within memory_budget. Given values do not change.

    Raises:
        AffluxError: the budget cannot be kept.
    """
    budget = options.memory_budget
    if budget is None:
        return options
    least = 1 if options.accumulate else rule.buffer_size
    max_slots, max_versions = options.max_slots, options.max_versions
    small = _plan(rule, d, replace(options, max_slots=max_slots or least), store=store, gpu=gpu)
    room = budget - small.memory_bytes
    if room < 0:
        parts = ", ".join(f"{name} {in_bytes(part.size)}" for name, part in (small.memory | small.working).items())
        raise AffluxError(
            f"[Server] memory_budget is {in_bytes(budget)}, but {in_bytes(small.memory_bytes)} may be needed: {parts}"
        )
    if max_slots is None:
        larger = _plan(rule, d, replace(options, max_slots=least + 1), store=store, gpu=gpu)
        slot = max(1, larger.memory_bytes - small.memory_bytes)
        max_slots = min(options.slots_of(rule), least + room // slot)
        room -= (max_slots - least) * slot
    if max_versions is None and "next params" in small.working:
        max_versions = min(MOST_COUNT, 2 + room // max(1, small.working["next params"].size))
    return replace(options, max_slots=max_slots, max_versions=max_versions)
