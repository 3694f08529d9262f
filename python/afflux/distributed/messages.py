"""The messages between a handle and the process that has the server: structs of msgspec, as bytes.

What crosses are numbers, texts, dicts and lists, and of an array its dtype, shape and bytes. No class and no function
does: requests, errors and dtypes have names in closed lists. A message is read by the schema of what is expected.
"""

import builtins
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from numbers import Integral, Real
from operator import or_
from traceback import format_exception_only
from typing import Annotated, Any, get_args

import numpy as np
from msgspec import Meta, Struct, convert, msgpack

from afflux.aggregation.reports import Receipt
from afflux.distributed.shard import Ref
from afflux.ops import Ingested, Kind, errors
from afflux.ops.errors import AffluxError, StoreError
from afflux.ops.validation import as_float, as_int, as_text, brief, zero_dim
from afflux.rules.rule import ClientId, Float64

#: The classes of errors that cross, by name: afflux's and Python's.
ERRORS: Mapping[str, type[Exception]] = {
    name: each
    for name, each in {**vars(builtins), **vars(errors)}.items()
    if isinstance(each, type) and issubclass(each, Exception)
}


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A request, or a reply."""


class Checkout(Message, frozen=True):
    """The request of `ServerHandle.checkout`; the server checks the arguments."""

    client: Any
    lease: Any
    hold: Any


class Push(Message, frozen=True):
    """The first request of a push."""

    kinds: tuple[Kind, ...]  #: of its vectors, one if the call is right
    arguments: dict[str, Any]  #: the others of `Server.push`, which checks them
    buffers: Float64 | None
    timeout: Annotated[float, Meta(gt=0)]  #: seconds for which the server waits for the next one


class Pull(Message, frozen=True):
    """The first request of a pull."""

    task: Any  #: an id; None: the newest version
    timeout: Annotated[float, Meta(gt=0)]  #: as of `Push`


class Written(Message, frozen=True):
    """The second request of a push: what the shards have found in its slices."""

    facts: tuple[Ingested, ...]


class Done(Message, frozen=True):
    """The second request of a pull, whose slices are no longer needed, and the reply to it."""


class Failed(Message, frozen=True):
    """An error: in place of a reply, or of `Written`."""

    name: str  #: of its class, one of `ERRORS`
    arguments: tuple[Any, ...]
    joined: bool | None = None  #: of a StoreError

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """Return the message of an error: of a class that is neither afflux's nor Python's, an AffluxError's."""
        if type(error).__module__.partition(".")[0] in ("afflux", "builtins"):
            with suppress(Exception):  # its arguments do not cross
                name = next(kind.__name__ for kind in type(error).__mro__ if ERRORS.get(kind.__name__) is kind)
                failed = cls(name, error.__reduce__()[1], getattr(error, "joined", None))  # type: ignore[arg-type]
                if str(decode(encode(failed), "an error", cls).error()) == str(error):
                    return failed
        return cls("AffluxError", (f"[handle] {error_text(error)}",))

    def error(self) -> Exception:
        """Return the error: of a class that this process lacks, an AffluxError."""
        error = ERRORS.get(self.name, AffluxError)(*self.arguments)
        if isinstance(error, StoreError):
            error.joined = self.joined
        return error


#: The call of `ingest` by which a client writes its slice into a part: the plane, the slot, the number of threads, and
#: the fields of an `ops.Conversion`.
SliceWrite = tuple[Ref, Ref, int, tuple[Kind, Kind, Ref | None, float] | None]


class SliceWrites(Message, frozen=True):
    """The reply to the first request of a push."""

    token: int  #: for the second one
    writes: tuple[SliceWrite, ...]  #: of each part


class VersionParts(Message, frozen=True):
    """The reply to a pull: the vectors of a version, which the server holds until the client has read them."""

    token: int
    version: int
    buffers: Float64 | None
    parts: tuple[Ref, ...]


class PushResult(Message, frozen=True):
    """The last reply to a push."""

    receipt: Receipt


class RemoteTask(Message, frozen=True):
    """The result of `ServerHandle.checkout`."""

    id: str  #: for `pull` and `push`
    client: ClientId
    version: int  #: that the client trains from


def plain(subject: str, value: object) -> Any:
    """Return an argument as numbers, texts, dicts and lists of Python.

    Raises:
        AffluxError: it has none of these forms.
    """
    value = zero_dim(value)
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, Mapping):
        return {plain(subject, name): plain(subject, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(subject, each) for each in value]
    is_float = isinstance(value, Real) and not isinstance(value, Integral)
    result = as_float(value) if is_float else as_text(value) if isinstance(value, str) else as_int(value)
    with suppress(OverflowError, UnicodeError):  # an int of more than 64 bits, or a lone surrogate
        if result is not None and encode(result):
            return result
    raise AffluxError(f"{subject} is {brief(value)}: a handle sends numbers, ints of 64 bits, Unicode texts and dicts")


def _encoded(value: object) -> Any:
    if isinstance(value, Ref):
        return value.number
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return plain("[handle] a value", value)


def _decoded(kind: Any, data: Any) -> Any:
    if kind is Ref:
        return Ref(convert(data, int))
    dtype = np.dtype(get_args(get_args(kind)[1])[0]).str
    name, shape, content = convert(data, tuple[str, tuple[Annotated[int, Meta(ge=0)], ...], bytes])
    if name != dtype:
        raise ValueError(f"an array is {brief(name)}, must be {dtype}")
    return np.frombuffer(content, dtype).reshape(shape)


encode = msgpack.Encoder(enc_hook=_encoded).encode


def decode(data: bytes, problem: str, *kinds: type[Message]) -> Any:
    """Return a message of one of these kinds.

    Raises:
        AffluxError: it is none: the problem, and the error.
    """
    try:
        return msgpack.decode(data, type=reduce(or_, kinds), dec_hook=_decoded)
    except Exception as error:
        raise AffluxError(f"[handle] {problem}: {error_text(error)}") from None


def error_text(error: BaseException) -> str:
    """Return the class and the message of an error, also if its `__str__` fails."""
    return "".join(format_exception_only(error)).strip()
