"""Laws of the clients' running times, those of the papers; the unit is the law's own.

A law has a name and options: `fadas-large:gamma=0.5`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.sim.workload.availability import check_finite, check_positive, check_range, read_law

#: (client, stream) -> running time of one dispatch of the client, drawn from the stream; `np.random` is not seeded.
#:
#: A law with a parameter `now` is given the virtual time of the dispatch by that name.
Delay: TypeAlias = Callable[..., float]
#: (number of clients, random stream for values that are fixed per client) -> Delay.
DelayLaw: TypeAlias = Callable[[int, np.random.Generator], Delay]

MOST_GAMMA = 1e6


@dataclass(frozen=True)
class ConstantDelays:
    """Every dispatch takes 1: the staleness depends only on the concurrency."""

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw nothing."""
        return lambda client, times: 1.0


@dataclass(frozen=True)
class ExponentialDelays:
    """Exponential(1) at each dispatch (Anarchic FL's wall-clock)."""

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw nothing for the clients."""
        return lambda client, times: float(times.exponential())


def fadas_classes(num_clients: int, rng: np.random.Generator, gamma: float = 1.0) -> np.ndarray:
    """Return the class of each client, 0 small, 1 medium, 2 large: argmax of p ~ Dirichlet(3g, 2g, g)."""
    shares = rng.dirichlet((3 * gamma, 2 * gamma, gamma), size=num_clients)
    return np.asarray(np.argmax(shares, axis=1))


@dataclass(frozen=True)
class FadasDelays:
    """FADAS's running times (its Table 1): three classes of clients, drawn by a Dirichlet law.

    U(1, 2), U(3, 5) or U(low, high) by the client's class, drawn anew at each dispatch; the unit is 10 s.
    """

    low: float  #: bounds of the class of large delays: 50 and 80 (large worst-case), or 5 and 8 (mild)
    high: float
    gamma: float = 1.0  #: smaller: more clients of the class large

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        if not 0 <= self.low <= self.high < float("inf"):
            raise ConfigError(f"low and high are {self.low} and {self.high}, must be 0 <= low <= high and finite")
        check_range(self, 1 / MOST_GAMMA, MOST_GAMMA, "gamma")

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw the class of each client."""
        intervals = ((1.0, 2.0), (3.0, 5.0), (self.low, self.high))
        classes = fadas_classes(num_clients, rng, self.gamma)
        return lambda client, times: float(times.uniform(*intervals[classes[client]]))


@dataclass(frozen=True)
class HalfNormalDelays:
    """CA2FL's running times (its appendix D): half-normal laws, one for each client.

    halfnorm(s): s + |N(0, 1)|, drawn anew at each dispatch. The paper writes halfnorm(s) without naming the parameter.
    The location fits its numbers, and the scale does not: docs/reference/data.md.
    """

    upper: float = 5.0  #: s ~ U(0, upper), drawn for each client at the start: 5, 1 or 0.5 in the paper.
    s: float | None = None  #: the same s for all clients: 5 in the paper's fixed law

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        check_positive(self, "upper")
        check_finite(self, *(["s"] if self.s is not None else []))

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw the s of each client."""
        s = rng.uniform(0.0, self.upper, size=num_clients) if self.s is None else np.full(num_clients, self.s)
        return lambda client, times: float(s[client] + abs(times.standard_normal()))


@dataclass(frozen=True)
class TiedDelays:
    """The running times of another law, the slowest of which go to the clients with most examples of some classes.

    The law draws for each client what it draws without this. Then these running times change clients: the shortest ones
    go to the clients with fewest examples of the classes. So the times that there are do not depend on the data.
    """

    #: Draws of a client, by whose mean the clients are sorted.
    PROBES: ClassVar[int] = 16
    law: DelayLaw
    classes: tuple[int, ...]
    #: Examples of these classes that each client has; None: the data are not known yet.
    held: tuple[int, ...] | None = None

    def of(self, data: Sequence[Any]) -> "TiedDelays":
        """Return the law for clients with these data sets; raise ConfigError if they have no labels of the classes."""
        try:
            labels = [np.asarray(own[1] if isinstance(own, tuple) else own.y) for own in data]
        except AttributeError:
            raise ConfigError("delays: tied needs clients whose data sets are (x, y), with labels y") from None
        held = tuple(int(np.isin(own, self.classes).sum()) for own in labels)
        if not any(held):
            raise ConfigError(f"delays: tied={'+'.join(map(str, self.classes))}, but no client has such an example")
        return replace(self, held=held)

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw as the law does; raise ConfigError without `of`."""
        if self.held is None:
            raise ConfigError("delays: tied needs the data of the clients, which only a simulation has")
        delay = self.law(num_clients, rng)
        probe = np.random.Generator(np.random.PCG64(int(rng.integers(2**63))))
        means = [sum(delay(client, probe) for _ in range(self.PROBES)) for client in range(num_clients)]
        places = np.empty(num_clients, np.int64)
        places[np.argsort(self.held, kind="stable")] = np.argsort(means, kind="stable")
        return lambda client, times: delay(int(places[client]), times)


#: The delays of the task itself.
DELAYS_OF_TASK = "task"

#: A dataclass whose fields are the options, and which is a `DelayLaw`; and the options that the name sets, which those
#: of the text replace.
DELAYS: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "constant": (ConstantDelays, {}),
    "exponential": (ExponentialDelays, {}),
    "fadas-large": (FadasDelays, {"low": 50.0, "high": 80.0}),
    "fadas-mild": (FadasDelays, {"low": 5.0, "high": 8.0}),
    "ca2fl": (HalfNormalDelays, {}),
    "ca2fl-1": (HalfNormalDelays, {"upper": 1.0}),
    "ca2fl-0.5": (HalfNormalDelays, {"upper": 0.5}),
    "ca2fl-fixed": (HalfNormalDelays, {"s": 5.0}),
}


def delay_law(text: str) -> DelayLaw:
    """Return the law of `NAME` or `NAME:OPTION=VALUE:...`, a name of `DELAYS`; with `tied=8+9` a `TiedDelays`.

    Raises:
        ConfigError: an unknown name or option, a value out of range, or an option that is missing.
    """
    if text == DELAYS_OF_TASK:
        raise ConfigError(f"delays is {DELAYS_OF_TASK}, which is for a task that has delays of its own")
    law, more = read_law("delays", text, DELAYS, (DELAYS_OF_TASK,), {"tied": str})
    try:
        return _tied(law, more["tied"]) if more else law
    except ConfigError as error:
        raise ConfigError(f"delays {text}: {error}") from None


def _tied(law: DelayLaw, classes: str) -> TiedDelays:
    if isinstance(law, HalfNormalDelays) and law.s is not None:
        raise ConfigError("tied, but all clients of this law are alike")
    try:
        return TiedDelays(law, tuple(map(int, classes.split("+"))))
    except ValueError:
        raise ConfigError(f"tied is {classes}, must be numbers of classes, such as 8+9") from None
