"""Errors that callers keep: their tracebacks must hold no slot and no version of params."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from afflux.aggregation.frames import clear_stored_frames

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def clear_tracebacks(error: BaseException) -> None:
    """Clear the local variables of afflux's ended calls in the tracebacks of an error and of its causes.

    The frames of the caller's own code, such as a rule's weigh part, stay as they are for a debugger. A frame keeps its
    function: closures of functions that may raise must not hold a slot or a version.
    """
    errors, ids = [error], {id(error)}
    while errors:
        error = errors.pop()
        entry = error.__traceback__
        while entry is not None:
            frame, entry = entry.tb_frame, entry.tb_next
            if frame.f_globals.get("__name__", "").startswith("afflux."):
                with suppress(RuntimeError):  # the call has not ended
                    frame.clear()
        for cause in (error.__cause__, error.__context__):
            if cause is not None and id(cause) not in ids:
                ids.add(id(cause))
                errors.append(cause)


def clears_tracebacks(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a public function clear the tracebacks of the errors that it raises, and the frames that parts keep."""

    @wraps(call)
    def cleared(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            clear_tracebacks(error)
            raise
        finally:
            del args, kwargs
            clear_stored_frames()

    return cleared
