"""Messages to the shards of a server: one for each shard, to all of them at once. Ray is imported when it is used.

Who has a `Connection` is the process of the server, or a client to which it was sent.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from secrets import token_hex
from threading import Lock
from types import MappingProxyType
from typing import Any

from afflux.distributed.shard import Call, Failure, Ref
from afflux.ops.errors import AffluxError, PlaneError, StoreError, UnavailableError
from afflux.ops.validation import raise_if_from_signal, shortened

#: Seconds of waiting for the start of actors or tasks after which a warning says which resources they request.
WARN_AFTER = 20.0
#: Seconds after which it is an error, by default.
START_TIMEOUT = 60.0


class RemoteShard:
    """An actor that holds a shard, and the calls that are sent with the next one."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.later: list[Call] = []
        self._lock = Lock()

    def __reduce__(self) -> Any:
        return RemoteShard, (self.actor,)

    def send(self, epoch: int, first: Sequence[Call], calls: Sequence[Call]) -> Any:
        """Send calls, `first` those without reply; return the reference of the results of `calls`."""
        with self._lock:
            before = self.later[:]
            reply = self.actor.call.remote(epoch, [*before, *first], calls)
            del self.later[: len(before)]  # after an interrupt they are sent again
        return reply


class Connection:
    """The shards of one server."""

    def __init__(self, number: int, epoch: int) -> None:
        self.number = number  #: of shards
        self.epoch = epoch
        self.remotes: list[RemoteShard] = []
        self.shard_of: list[int] = []  #: of each part
        self.path: Path | None = None  #: of the store
        self._lost: AffluxError | None = None

    def begin(self, parts: Sequence[int], requests: Sequence[Mapping[str, Any]], timeout: float | None) -> None:
        """Let the actors begin anew, with planes for these numbers of parts, when they have started.

        Raises:
            UnavailableError: an actor with these options has not started within `timeout` seconds.
        """
        calls = [Call(Ref(0), "begin", (number,), {}) for number in parts]
        replies = [shard.send(self.epoch, (), [call]) for shard, call in zip(self.remotes, calls, strict=True)]
        try:
            await_start("[RayPlane] shard", replies, requests, timeout)
        except UnavailableError:
            self.close()
            raise
        self._wait(replies)

    def send(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> None:
        """Call a method of some shards themselves."""
        calls = [[Call(Ref(0), name, tuple(arguments[k]), {})] if k in arguments else [] for k in range(self.number)]
        for results in self._exchange([((), each) for each in calls]):
            for result in results:
                if isinstance(result, Failure):
                    raise result.error

    def settled(self, calls: Mapping[int, Call], first: Mapping[int, Call] = MappingProxyType({})) -> dict[int, Any]:
        """Make one call in each of these parts, in all shards at once; return their results.

        Args:
            calls: by part.
            first: calls without reply whose objects `calls` need. They are made before, and again if this is repeated.

        Raises:
            PlaneError: a shard has ended or failed, or the cluster; a StoreError, if there is a store.
            AffluxError: a call has failed: the error of the first one, after all have ended.
        """
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)
        parts_of_shards = [[k for k in sorted(calls) if self.shard_of[k] == number] for number in range(self.number)]
        results = dict[int, Any]()
        messages = [[[each[k] for k in parts if k in each] for each in (first, calls)] for parts in parts_of_shards]
        replies = self._exchange(messages)
        for parts, values in zip(parts_of_shards, replies, strict=True):
            results.update(zip(parts, values, strict=True))
        for k in sorted(results):
            if isinstance(results[k], Failure):
                raise self._error(self.shard_of[k], results[k].error)
        return results

    def _exchange(self, messages: Sequence[Sequence[Sequence[Call]]]) -> list[Sequence[Any]]:
        """Send each shard calls without reply and others, if there are others, and wait for all results."""
        if not import_ray().is_initialized():  # sending would start another cluster
            raise self._loss("the connection to Ray's cluster has ended (ray.shutdown)")
        pairs = zip(self.remotes, messages, strict=True)
        try:
            replies = [shard.send(self.epoch, *each) if each[1] else None for shard, each in pairs]
        except Exception as error:
            raise_if_from_signal(error)
            raise self._loss(f"Ray cannot send to the shards ({shortened(str(error))})") from error
        return self._wait(replies)

    def _wait(self, replies: Sequence[Any]) -> list[Sequence[Any]]:
        """Wait for all replies of the shards; raise an error after that, if a shard is lost."""
        ray = import_ray()
        results, errors, dead = list[Sequence[Any]](), list[Exception](), dict[int, Exception]()
        for number, reply in enumerate(replies):
            result: Sequence[Any] = ()
            try:
                result = () if reply is None else ray.get(reply)
            except ray.exceptions.RayActorError as error:
                dead[number] = error
            except Exception as error:
                raise_if_from_signal(error)
                errors.append(self._error(number, getattr(error, "cause", error)))
            results.append(result)
        if dead:
            shards = ", ".join(map(str, dead))
            self._lost = self._loss(f"shard {shards} of {self.number} has ended")
            raise self._lost from next(iter(dead.values()))
        if errors:
            raise errors[0]
        return results

    def _error(self, shard: int, error: Exception) -> Exception:
        """Return the error of a call in a shard, as a PlaneError if no argument of the call can have caused it."""
        if isinstance(error, (AffluxError, UnavailableError, MemoryError, TypeError, ValueError, BufferError)):
            return error
        text = shortened(f"{type(error).__name__}: {error}")
        return PlaneError(f"[RayPlane] shard {shard} of {self.number} has failed: {text}")

    def _loss(self, event: str) -> AffluxError:
        remedy = (
            "a server without a store cannot go on; start again from a state of `Server.state_dict`"
            if self.path is None
            else f"Server.open({str(self.path)!r}, plane=RayPlane(...)) continues from the last commit. What has "
            "joined after it is lost: an arrival whose receipt's `durable` is None or a later version"
        )
        message = f"[RayPlane] {event}, and vectors are lost: {remedy}"
        return PlaneError(message) if self.path is None else StoreError(message)

    def close(self) -> None:
        """End the actors."""
        for shard in self.remotes:
            kill(shard.actor)


def import_ray() -> Any:
    """Import Ray.

    If this is the first import of Ray in the process, a cluster that the process starts listens on the loopback address
    only, and uses token authentication.

    Raises:
        UnavailableError: Ray is not installed.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listens on the loopback address only
        if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise UnavailableError(f"[RayPlane] needs Ray: pip install 'afflux[ray]' ({error})") from None
    return ray


def connected_ray() -> Any:
    """Return Ray, whose calls would start another cluster if the one of this process has ended.

    Raises:
        PlaneError: this process is not connected.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise PlaneError("[RayPlane] the connection to Ray's cluster has ended (ray.shutdown)")
    return ray


def kill(actor: Any) -> None:
    """End an actor, if its cluster has not ended."""
    with suppress(Exception):
        connected_ray().kill(actor)


def await_start(subject: str, replies: Sequence[Any], requests: Sequence[object], timeout: float | None) -> None:
    """Wait until actors or tasks of Ray have replied. After 20 seconds a warning says for which resources they wait.

    Args:
        subject: describes one of them in messages; its number follows.
        replies: references of their replies.
        requests: for each what was requested of Ray.
        timeout: seconds; None: no limit.

    Raises:
        UnavailableError: not all have replied within `timeout` seconds.
    """
    ray, first = import_ray(), WARN_AFTER if timeout is None else min(WARN_AFTER, timeout)
    _, waiting = ray.wait([*replies], num_returns=len(replies), timeout=first)
    if not waiting:
        return
    number = replies.index(waiting[0])
    total, free = (
        ", ".join(f"{name} {amount:g}" for name, amount in sorted(each.items()) if not name.startswith("node:"))
        for each in (ray.cluster_resources(), ray.available_resources())
    )
    text = f"{subject} {number} of {len(replies)} has not started: it requests {requests[number]}. The cluster has "
    text += f"{total}; free: {free or 'nothing'}"
    if first != timeout:
        getLogger("afflux").warning(text)
        limit = None if timeout is None else timeout - first
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=limit)
    if waiting:
        raise UnavailableError(f"{text} (after {timeout:g} seconds)")


def node_id() -> str:
    """Return the id of the node of Ray on which this process is."""
    node: str = import_ray().get_runtime_context().get_node_id()
    return node


def connect() -> None:
    """Start a cluster on this machine, if this process is connected to none."""
    ray = import_ray()
    if ray.is_initialized():
        return
    if "RAY_ADDRESS" not in os.environ and (
        os.environ.get("RAY_AUTH_MODE") != "token" or os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    ):
        raise UnavailableError(
            "[RayPlane] Ray was imported without token authentication: make the plane before the first `import ray`, "
            "or connect to a cluster of your own with ray.init"
        )
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
