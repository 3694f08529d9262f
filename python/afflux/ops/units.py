"""Numbers in a readable form."""

import math


def in_bytes(count: float) -> str:
    """Return a count of bytes with a decimal unit, to three digits.

    >>> in_bytes(0), in_bytes(65_000), in_bytes(1.5e12)
    ('0 B', '65 kB', '1.5 TB')
    """
    power = min(int(math.log10(max(count, 1)) // 3), 4)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


#: Bytes of an element, by the dtype of a vector.
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
