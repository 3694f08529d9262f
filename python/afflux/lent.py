"""Vectors that a round reads where the caller keeps them: no copy at the push, and the look for what is not finite is
part of the round's own sweep.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from afflux._arrays import on_host
from afflux.rule import Rule
from afflux.slots import Slot


def why_not(rule: Rule, *, inplace: bool, streaming: bool) -> str | None:
    """Why a server copies whatever is pushed; None if it may read it in place.

    A round that has read a value which is not finite is made again without that vector, so it must not overwrite
    anything but memory of its own.
    """
    if streaming:
        return "memory='streaming' adds it up at once"
    if inplace:
        return "inplace=True overwrites params"
    if rule.needs.gram:
        return f"{rule.name} takes inner products first"
    if rule.calibrate.cached:
        return f"{rule.name} overwrites cached rows"
    if rule.memories:
        return f"{rule.name} overwrites its {', '.join(rule.memories)}"
    return None


def first_nonfinite(slot: Slot) -> int | None:
    """The index of the first NaN or infinity; None if there is none."""
    good = finite(on_host(slot))
    return None if good.all() else int(np.argmin(good))


def finite(array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which elements are finite; uint16 stands for bfloat16, by whose exponent one sees it."""
    good: npt.NDArray[np.bool_] = np.isfinite(array) if array.dtype != np.uint16 else (array & 0x7F80) != 0x7F80
    return good
