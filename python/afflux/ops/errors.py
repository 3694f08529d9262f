"""The errors that afflux raises. They leave the state unchanged, except that an arrival has joined if a StoreError
has `joined`.
"""

from afflux._engine import AffluxError, UnavailableError

__all__ = ["AffluxError", "BlockedError", "BusyError", "PlaneError", "StoreError", "UnavailableError"]

AffluxError.__doc__ = """An argument of a call is invalid, or the call cannot be made now; a ValueError.

The message names the call and the argument. The other errors of afflux, but `UnavailableError`, are subclasses.
"""
UnavailableError.__doc__ = """This build, machine or process cannot do what a call requests; a RuntimeError.

Examples are an array on a device that is not supported, an extra that is not installed, and a child process that was
forked during a push.
"""


class ConfigError(AffluxError):
    """A setting is unknown or impossible: of the simulation, or of a rule that is given as text."""


class BusyError(AffluxError):
    """All slots are taken, or too many requests of handles wait: try again later."""


class BlockedError(BusyError):
    """The client has entered in this pass of gradient scheduling, or was in as many rounds as the rule allows."""


class PlaneError(AffluxError):
    """A process or device that holds vectors of the server has failed, or cannot be reached."""


class StoreError(AffluxError):
    """The folder of a store cannot be used. The last commit still exists."""

    joined: bool | None = None  #: after a `Server.push`: True if the arrival has joined, and must not be pushed again
