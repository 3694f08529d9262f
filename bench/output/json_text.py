"""Results as short JSON text that is easy to compare: summaries instead of samples, one line for each contender."""

import json
from collections.abc import Iterator
from typing import Any


def without_samples(value: Any) -> Any:
    """Return the results without the seconds of every sample; a summary of them stays."""
    if isinstance(value, dict):
        return {key: without_samples(part) for key, part in value.items() if key != "seconds"}
    return [without_samples(part) for part in value] if isinstance(value, list) else value


def to_json(value: Any) -> str:
    """Return JSON with one line for each object that holds no list, such as all figures of one contender."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    parts: list[tuple[str, Any]]
    if not _holds_a_list(value):
        yield json.dumps(value)
        return
    if isinstance(value, dict):
        (begin, end), parts = "{}", [(f"{json.dumps(key)}: ", part) for key, part in value.items()]
    else:
        (begin, end), parts = "[]", [("", part) for part in value]
    yield begin
    for number, (key, part) in enumerate(parts, 1):
        first, *rest = _lines(part)
        *rest, last = (f" {key}{first}", *(f" {line}" for line in rest))
        yield from rest
        yield last + "," * (number < len(parts))
    yield end


def _holds_a_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and any(map(_holds_a_list, value.values())))
