"""The types and ranges of the facts in the index, which are checked before any fact is used.

A checksum detects damage, but not forged values. So these schemas decode every value, and the values are compared with
each other.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, convert, to_builtins

from afflux._engine import ORDER_VERSION
from afflux.aggregation.clipping import WINDOW
from afflux.aggregation.options import STORED_OPTIONS, ServerOptions
from afflux.aggregation.sharded_plane import superblocks
from afflux.ops.codecs import named
from afflux.ops.errors import StoreError
from afflux.store.metadata import MOST_WAITING, NAME, Shape, is_sound
from afflux.store.shards import shapes_in

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
#: Elements of a vector: fewer than 2**48, so that sizes in bytes are ints of 64 bits.
Size = Annotated[int, Meta(ge=0, le=2**48 - 1)]
Name = Annotated[str, Meta(pattern=NAME)]


class _Facts(Struct, frozen=True, forbid_unknown_fields=True):
    """Facts. Decoding refuses unknown facts."""


class ServerFacts(_Facts, frozen=True, omit_defaults=True):
    """The facts with which a server that opens the store must agree."""

    rule: str
    kind: Literal["update", "gradient", "model"]
    d: Size
    dtype: Literal["float32", "float64"]
    slot_dtype: Literal["float32", "float64", "bfloat16"]
    num_clients: Positive | None
    rule_vectors: list[Name]
    layout: dict[str, Any] | None
    codec: str | None
    seed: int | None = None  #: of codecs that draw random bits
    cuts: list[Count] | None = None  #: the superblocks with which shards begin; None: in one piece
    noise: bool = False  #: whether the rule adds noise
    participations: Positive | None = None  #: the most rounds that a client is in; None: any number


class CommitSettings(_Facts, frozen=True):
    """The settings of commits."""

    durability: Literal["process", "power"]
    commit_every: Positive | None


class RepairEntry(_Facts, frozen=True):
    """A repair after which the bits may differ."""

    version: Count
    joins: Count
    dropped: list[int | str]
    arrivals: list[int | str]


class StoreFacts(_Facts, frozen=True):
    """All facts."""

    order_version: int
    server: ServerFacts
    options: dict[str, Any]  #: `ServerOptions` checks them
    commits: CommitSettings
    rule: dict[str, Any]  #: `from_config` checks it
    shapes: dict[str, tuple[str, Size, Positive]]
    repairs: list[RepairEntry]


class RowSlots(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The slots of the rows that are in use."""

    clients: Count
    high: Count
    free: list[Count]


class StateMeta(_Facts, frozen=True, omit_defaults=True):
    """The state of a commit, without arrays and lists; `checkpoint.load` compares it with the server."""

    durability: Literal["process", "power"]
    largest_row: Annotated[float, Meta(ge=0)]
    format: int
    order_version: int
    version: Count
    joins: Count
    counts: dict[str, Count]
    filled: Count
    added: Count
    raw: list[float]
    scalars: dict[str, float]
    handed: list[str]
    next_rule: dict[str, Any] | None
    retained_buffers: dict[str, list[float]]
    asked: list[Count]
    norms: Annotated[list[float], Meta(max_length=WINDOW)]
    rows: RowSlots | None = None


class ArrivalRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See `checkpoint.arrival_record`."""

    client_id: int | str
    version: Count
    num_examples: Positive
    loss: float | None
    norm: float | None
    least: float | None
    largest: float | None
    join: Count
    staleness: Count
    local_steps: Count = 0
    facts: dict[str, float] = {}


VectorEntry = tuple[str, Count, bytes]
#: number, joined, slot, crc, record, buffers
ArrivalEntry = tuple[Count, Count, Count | None, bytes | None, str, bytes | None]


def read_facts(texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return all facts of the store, decoded from JSON and checked, as plain dicts and lists.

    Raises:
        ValueError: a fact is missing, unknown, of a wrong type, out of range, or does not agree with another one.
        StoreError: an option has a value that servers no longer have.
    """
    facts = convert({name: json.loads(text) for name, text in texts.items()}, StoreFacts)
    for name in facts.options.keys() - {*STORED_OPTIONS}:  # that only afflux 0.1.0 had
        if facts.options.pop(name) is True:
            remedy = f"open it once with afflux 0.1.0 and {name}=False, and make a checkpoint"
            raise StoreError(f"[store] {path} has the option {name}=True, which servers no longer have: {remedy}")
    server = facts.server
    sizes: Any = {"num_clients": server.num_clients, "dtype": server.dtype, "slot_dtype": server.slot_dtype}
    ServerOptions(**sizes, **facts.options)  # raises an AffluxError, which is a ValueError
    _check_shapes(facts)
    plain: dict[str, Any] = to_builtins(facts)
    return plain


def _check_shapes(facts: StoreFacts) -> None:
    """Compare the arrays with those that a server of this kind needs: their names, dtypes and widths."""
    server = facts.server
    codec, cuts = named(server.codec), server.cuts or []
    if cuts != sorted(cuts) or (cuts and cuts[-1] > superblocks(server.d)):
        raise ValueError(f"shards of {server.d} elements begin with the superblocks {cuts[:100]}")
    if codec is not None and server.num_clients is None:
        raise ValueError("rows are kept, and num_clients is None")
    # The number of slots in a segment, which depends on the buffer_size of the first rule, is not compared.
    expected = shapes_in(to_builtins(server), facts.options, cuts, server.rule_vectors, 1, codec)
    if set(facts.shapes) != set(expected):
        raise ValueError(f"the arrays are {sorted(facts.shapes)}, must be {sorted(expected)}")
    for name, (dtype, width, _) in expected.items():
        shape, slots = Shape(*facts.shapes[name]), MOST_WAITING + (server.num_clients or 0)
        if (shape.dtype, shape.width) != (dtype, width) or not is_sound(shape, slots):
            raise ValueError(f"the array {name} has {shape}, for slots of {width} {dtype}")


def read_state(meta: str, facts: Mapping[str, Any], vectors: Collection[str]) -> dict[str, Any]:
    """Return the facts of the state, decoded from JSON and checked against those of the store.

    `vectors` are the names of the state's vectors.

    Raises:
        ValueError: see `read_facts`.
    """
    state = convert(json.loads(meta), StateMeta)
    codec, rows = facts["server"]["codec"], state.rows
    if (rows is None) != (codec is None):
        raise ValueError(f"the codec is {codec}, and the state {'has' if rows is not None else 'lacks'} rows")
    if rows is not None:
        if rows.clients > facts["server"]["num_clients"] or rows.high != rows.clients + len(rows.free):
            raise ValueError(f"{rows.clients} clients and {len(rows.free)} free slots are {rows.high} slots")
        if len(set(rows.free)) < len(rows.free) or any(slot >= rows.high for slot in rows.free):
            raise ValueError("a free slot is listed twice, or beyond those in use")
    if state.added and "total" not in vectors:
        raise ValueError(f"{state.added} arrivals are in a sum that is missing")
    if state.order_version != ORDER_VERSION:
        raise ValueError(f"order_version is {state.order_version}")
    plain: dict[str, Any] = to_builtins(state)
    return plain


def check_entries(vectors: Sequence[VectorEntry], arrivals: Sequence[ArrivalEntry], facts: Mapping[str, Any]) -> None:
    """Check the entries of a commit.

    Each array has a vector, except rows, arrivals and a total that is empty. Params may also have older vectors. No two
    arrivals share a slot.

    Raises:
        ValueError: a name is missing, or has no array; or a slot is taken twice.
    """
    names = {name for name, _, _ in vectors}
    older = {name for name in names if name.startswith("params:")}
    missing = names - older ^ {name.rpartition("/")[2] for name in facts["shapes"]} - {"rows", "arrivals"}
    if missing - ({"total"} - names):  # an empty sum is not stored
        raise ValueError(f"the vectors are {sorted(names)}")
    for name in older:
        digits = name.removeprefix("params:")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise ValueError(f"a vector is called {name[:100]!r}")
    slots = [entry[2] for entry in arrivals if entry[2] is not None]
    if len(set(slots)) < len(slots):
        raise ValueError("two arrivals have one slot")
