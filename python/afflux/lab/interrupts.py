"""Deferred Ctrl-C: it raises between two steps of the work, and not in the middle of an import, a write or a start."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_SECONDS = 1.0
_pressed_at: float | None = None
_kind: type[KeyboardInterrupt] = KeyboardInterrupt


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM."""


@contextmanager
def deferred(then: Callable[[int, FrameType | None], object] | signal.Handlers | None = None) -> Iterator[None]:
    """Record Ctrl-C in the block.

    `raise_if_pending`, or else the end of the block, raises KeyboardInterrupt for a recorded Ctrl-C.

    A second Ctrl-C, a second or more after the first, raises at once: it stops work that no longer calls
    `raise_if_pending`. The block has no effect in other threads than the main one, inside another such block, or if
    Ctrl-C is ignored or handled by the caller.

    Args:
        then: the handler after the block; default the one before it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, then or before)
        pressed = _take_pending()
    if pressed is not None:
        raise pressed


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C in the block, but raise Terminated.

    Batch systems send SIGTERM seconds before SIGKILL.

    In a block of `deferred`, SIGTERM is recorded like Ctrl-C; elsewhere it raises at once. The block has no effect in
    other threads than the main one, or if SIGTERM is ignored or handled by the caller.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def raise_if_pending() -> None:
    """Raise KeyboardInterrupt, once, if Ctrl-C was recorded."""
    pressed = _take_pending()
    if pressed is not None:
        raise pressed


def _take_pending() -> type[KeyboardInterrupt] | None:
    """Return and clear the exception of the recorded signal; None if there is none."""
    global _pressed_at, _kind
    pending = None if _pressed_at is None else _kind
    _pressed_at, _kind = None, KeyboardInterrupt
    return pending


def _terminate(number: int, frame: FrameType | None) -> None:
    global _kind
    if signal.getsignal(signal.SIGINT) is not _record:  # outside of `deferred`, no code checks for the signal
        raise Terminated
    _kind = Terminated
    _record(number, frame)


def _record(number: int, frame: FrameType | None) -> None:
    """Record the first of the signals; a later signal does not replace a recorded SIGTERM."""
    global _pressed_at
    now = time.monotonic()
    if _pressed_at is None:
        _pressed_at = now
    elif now - _pressed_at >= PATIENCE_SECONDS:
        raise _kind
