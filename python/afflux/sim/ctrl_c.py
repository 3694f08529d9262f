"""Ctrl-C as a question that work asks between two steps, not an exception amid an import, a write or a start."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_SECONDS = 1.0
_pressed_at: float | None = None


@contextmanager
def held(then: Callable[[int, FrameType | None], object] | signal.Handlers | None = None) -> Iterator[None]:
    """Note Ctrl-C in the block; `check` raises KeyboardInterrupt for it, and else the end of the block.

    Work that asks no longer is stopped by pressing again, a second or more later: that raises at once. Nothing changes
    in other threads than the main one, amid another such block, or if Ctrl-C is ignored or handled by the caller.
    `then` is the handler after the block; default the one before it.
    """
    global _pressed_at
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, then or before)
        pressed, _pressed_at = _pressed_at is not None, None
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def sigterm_too() -> Iterator[None]:
    """SIGTERM counts as Ctrl-C in the block: batch systems send it some seconds before they kill.

    Nothing changes in other threads than the main one, or if it is ignored or handled by the caller.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check() -> None:
    """Raise KeyboardInterrupt, once, if Ctrl-C was noted."""
    global _pressed_at
    if _pressed_at is not None:
        _pressed_at = None
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _pressed_at
    now = time.monotonic()
    if _pressed_at is None:
        _pressed_at = now
    elif now - _pressed_at >= PATIENCE_SECONDS:
        raise KeyboardInterrupt
