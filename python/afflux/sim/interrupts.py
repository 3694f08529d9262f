"""Ctrl-C as a question that work asks between two steps, not an exception amid an import, a write or a start."""

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
    """It was SIGTERM."""


@contextmanager
def held(then: Callable[[int, FrameType | None], object] | signal.Handlers | None = None) -> Iterator[None]:
    """Note Ctrl-C in the block; `check` raises KeyboardInterrupt for it, and else the end of the block.

    Work that asks no longer is stopped by pressing again, a second or more later: that raises at once. Nothing changes
    in other threads than the main one, amid another such block, or if Ctrl-C is ignored or handled by the caller.
    `then` is the handler after the block; default the one before it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, then or before)
        pressed = _taken()
    if pressed is not None:
        raise pressed


@contextmanager
def sigterm_too() -> Iterator[None]:
    """SIGTERM counts as Ctrl-C in the block, but raises Terminated: batch systems send it seconds before they kill.

    In a block of `held` it is noted as Ctrl-C is; elsewhere it raises at once.

    Nothing changes in other threads than the main one, or if it is ignored or handled by the caller.
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


def check() -> None:
    """Raise KeyboardInterrupt, once, if Ctrl-C was noted."""
    pressed = _taken()
    if pressed is not None:
        raise pressed


def _taken() -> type[KeyboardInterrupt] | None:
    """What was noted, if anything was; it is not any more."""
    global _pressed_at, _kind
    noted = None if _pressed_at is None else _kind
    _pressed_at, _kind = None, KeyboardInterrupt
    return noted


def _terminate(number: int, frame: FrameType | None) -> None:
    global _kind
    if signal.getsignal(signal.SIGINT) is not _note:  # nobody would ask
        raise Terminated
    _kind = Terminated
    _note(number, frame)


def _note(number: int, frame: FrameType | None) -> None:
    """Of both: SIGTERM stays what it was, whatever is pressed after it."""
    global _pressed_at
    now = time.monotonic()
    if _pressed_at is None:
        _pressed_at = now
    elif now - _pressed_at >= PATIENCE_SECONDS:
        raise _kind
