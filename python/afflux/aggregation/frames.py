"""Frames of afflux that a rule's own part keeps, with an exception that it has caught: they hold slots and versions."""

from contextlib import suppress
from sys import _getframe, getrefcount
from threading import get_ident
from types import FrameType

_stored: dict[int, list[FrameType]] = {}  # by thread


def note_stored_frames() -> None:
    """Note the caller's frame, and the frames of afflux above it, if an object refers to the caller's frame.

    A frame that ends refers to its caller's frame. So an exception that a rule's part has caught and stored keeps the
    local variables of all frames above the part.
    """
    if getrefcount(_getframe(1)) > _UNSTORED:
        frames = _stored.setdefault(get_ident(), [])
        frame: FrameType | None = _getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("afflux."):
            frames.append(frame)
            frame = frame.f_back


def clear_stored_frames() -> None:
    """Clear the local variables of the frames that this thread has noted, if they have ended."""
    if _stored:
        for frame in _stored.pop(get_ident(), ()):
            with suppress(RuntimeError):
                frame.clear()


def _references() -> int:
    return getrefcount(_getframe(1))


def _caller() -> int:
    return _references()


_UNSTORED = _caller()  # of a frame to which no object refers
