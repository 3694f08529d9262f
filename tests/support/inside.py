"""What tests read inside a server, and put into it, in one place: what no public call says or does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from afflux import Server
from afflux._engine import set_clock


def aggregator_of(server: Server) -> Any:
    """The control of a server: its admission, slots, versions and tasks."""
    return server._aggregator


def slots_taken(server: Server) -> int:
    """The number of slots that hold a vector: a push that is refused keeps none."""
    return int(aggregator_of(server).plane.slots_taken)


def slots_limit(server: Server) -> int:
    """The most slots at a time."""
    return int(aggregator_of(server).max_slots)


def without_fast_path(server: Server) -> None:
    """Let all pushes take the general way, which tests can hold up."""
    admission = aggregator_of(server).admission
    admission.push = admission.join = admission.take_all = lambda *_: None


def monitor_of(server: Server) -> Any:
    """The mutex of a server, and the steps that threads make under it."""
    return aggregator_of(server)


def mutex_of(server: Server) -> Any:
    """The mutex itself."""
    return monitor_of(server).mutex


def decide_elsewhere(server: Server, elsewhere: bool) -> None:
    """Let the server look as if another thread decided at this time, or no longer."""
    mutex_of(server).handed_out = elsewhere


def rounds_of(server: Server) -> Callable[[Any], None]:
    """The function that makes the rounds of a server, called with each."""
    function: Callable[[Any], None] = monitor_of(server)._run
    return function


def make_rounds_by(server: Server, function: Callable[[Any], None]) -> None:
    """Let another function make the rounds of a server."""
    monitor_of(server)._run = function


@contextmanager
def stopped_clock(seconds: float = 0.0) -> Iterator[Callable[[float], None]]:
    """A block in which the time of servers stands still; it gives the function that sets it."""
    set_clock(seconds)
    try:
        yield set_clock
    finally:
        set_clock(None)


def store_of(server: Server) -> Any:
    """The store of a server."""
    return server._store


def index_of(server: Server) -> Any:
    """The index of a server's store."""
    return store_of(server)._index
