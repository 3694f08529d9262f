"""The clip of weights by the norms of their vectors: `ServerOptions.clip_norms`."""

from collections.abc import Sequence
from math import inf

#: The number of arrivals of earlier rounds whose norms count.
WINDOW = 64
#: The fewest positive norms with a median: of the window and the buffer, and of the buffer alone.
FEWEST, FEWEST_ALONE = 8, 3


def median_norm(window: Sequence[float], norms: Sequence[float]) -> float | None:
    """Return the median of the positive norms of earlier arrivals and of a buffer; None if there are too few.

    Fewer than half of the norms cannot move it beyond the others.
    """
    buffered = [norm for norm in norms if norm > 0]  # not NaN, the norm of a vector that a step reads in place
    positive = sorted([norm for norm in window if norm > 0] + buffered)
    if len(positive) < FEWEST:
        positive = sorted(buffered)
        if len(positive) < FEWEST_ALONE:
            return None
    half = len(positive) // 2
    return positive[half] if len(positive) % 2 else 0.5 * positive[half - 1] + 0.5 * positive[half]


def clip_factors(multiple: float, window: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Return min(1, multiple * median / norm) of each norm."""
    median = median_norm(window, norms)
    bound = inf if median is None else multiple * median
    return [bound / norm if norm > bound else 1.0 for norm in norms]


def next_window(window: tuple[float, ...], norms: Sequence[float]) -> tuple[float, ...]:
    """Return the window after a round: no saved state has an infinite norm."""
    return (*window, *(norm for norm in norms if norm < inf))[-WINDOW:]
