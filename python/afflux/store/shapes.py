"""Which arrays a store has."""

from afflux.aggregation.checkpoint import STORED
from afflux.aggregation.options import codec_of
from afflux.rules.rule import Rule
from afflux.store.metadata import Shape, shape_of


def shapes_of(
    rule: Rule, d: int, *, num_clients: int | None, dtype: str, slot_dtype: str, accumulate: bool
) -> dict[str, Shape]:
    """By name, for a server with these arguments."""
    shapes = {
        "params": shape_of(dtype, d, 4),
        "arrivals": shape_of(STORED[slot_dtype], d, rule.buffer_size),
        **{f"memory.{name}": shape_of(dtype, d, 2) for name in rule.memories},
    }
    if accumulate:
        shapes["total"] = shape_of("float64", d, 2)
    codec = codec_of(rule, slot_dtype)
    if codec is not None:
        shapes["sum"] = shape_of("float64", d, 2)
        shapes["rows"] = shape_of(codec.row_dtype, codec.row_size(d), (num_clients or 0) + rule.buffer_size)
    return shapes
