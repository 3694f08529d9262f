"""The discrete-event loop: the times at which clients start training and finish.

The schedule does not depend on models: one seed gives every rule the same dispatches and delays.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from afflux.ops.validation import brief
from afflux.rules import SYNCHRONOUS
from afflux.sim.errors import ConfigError, note_on_errors
from afflux.sim.workload.config import SAMPLING, SimConfig
from afflux.sim.workload.delays import Delay, DelayLaw, delay_law
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.rule_specs import RuleSpec


class Dispatch(NamedTuple):
    """A client pulls the model and starts training."""

    time: float
    sequence: int
    client: int
    age: int = 0
    """Age of the model that the client pulls: 0 is the newest model, 1 the one before it, ..."""
    finish: float = 0.0
    """Time of the arrival of its result."""


class Arrival(NamedTuple):
    """The result of dispatch number `sequence` reaches the server."""

    time: float
    sequence: int
    client: int


class Draws(NamedTuple):
    """The random choices of a schedule."""

    delay: Delay  #: law of the running times
    selection: np.random.Generator  #: for the choice of clients
    times: np.random.Generator  #: for the running times

    @classmethod
    def of(cls, law: DelayLaw, num_clients: int, seed: int) -> "Draws":
        """Return those of a run with this law."""
        with note_on_errors("while the law of delays was called"):
            delay = law(num_clients, random_stream(seed, StreamPurpose.DELAY_CLIENTS))
        if not callable(delay):
            raise ConfigError(f"delays: the law is {brief(delay)}, must be a function (client, rng) -> running time")
        return cls(delay, *(random_stream(seed, of) for of in (StreamPurpose.SELECTION, StreamPurpose.DELAY_TIMES)))

    def running_time(self, client: int) -> float:
        """Draw the running time of a client; raise ConfigError if it is impossible, because a law may be the user's."""
        try:
            drawn = self.delay(client, self.times)
            possible = 0 <= drawn < inf
        except Exception as error:
            error.add_note(f"while the running time of client {client} was drawn")
            raise
        if not possible:
            raise ConfigError(f"delays: the running time of client {client} is {drawn}, must be 0 or more and finite")
        return drawn


def schedule_events(
    clients: Sequence[int], draws: Draws, concurrency: int, arrivals: int, refill: int = 1, blocked: bool = False
) -> Iterator[Dispatch | Arrival]:
    """Yield dispatches and arrivals in the order of virtual time, until `arrivals` arrivals.

    A client that finishes is replaced by one drawn uniformly from the idle clients, itself included. Arrivals with
    equal finish times come in the order of dispatch.

    Args:
        clients: the clients that hold data.
        draws: of clients and running times.
        concurrency: number of clients that train at the same time.
        arrivals: number of arrivals after which the schedule ends.
        refill: replacements start when this number of clients have finished. 1: at once; the buffer size: the loop of
            CA2FL and FADAS; `concurrency`: FedAvg's rounds. WKAFL's K-async law is K, with all P clients training at
            once: only the K clients that finished are idle, so they get the new model.
        blocked: whether a client that has finished is idle again only when all clients have finished, which ends the
            pass; as long as no client is idle, none starts (GSGM, as in WKAFL section 6.1.2).

    Yields:
        Dispatches and arrivals, `Dispatch` before the `Arrival` with the same sequence number.

    Raises:
        ValueError: `concurrency` or `refill` is out of range.
    """
    if not 1 <= concurrency <= len(clients):
        raise ValueError(f"[schedule_events] concurrency {concurrency} is not in 1..{len(clients)}")
    if not 1 <= refill <= concurrency:
        raise ValueError(f"[schedule_events] refill {refill} is not in 1..{concurrency}")
    idle = list(clients)
    entered: list[int] = []  # clients that wait for the end of the pass
    training: list[tuple[float, int, int]] = []
    sequence = 0
    now = 0.0
    done = 0
    vacant = concurrency
    while done < arrivals:
        starts = min(vacant, len(idle))
        for _ in range(starts):
            # Swapping with the last entry makes the draw O(1); the order of `idle` is still deterministic.
            chosen = int(draws.selection.integers(len(idle)))
            idle[chosen], idle[-1] = idle[-1], idle[chosen]
            client = idle.pop()
            finish = now + draws.running_time(client)
            yield Dispatch(now, sequence, client, finish=finish)
            heappush(training, (finish, sequence, client))
            sequence += 1
        now, number, client = heappop(training)
        yield Arrival(now, number, client)
        (entered if blocked else idle).append(client)
        if len(entered) == len(clients):
            idle, entered = entered, []
        done += 1
        vacant += (refill if done % refill == 0 else 0) - starts


def schedule_rounds(
    clients: Sequence[int],
    draws: Draws,
    ages: np.random.Generator,
    cohort: int,
    arrivals: int,
    stale_models: int,
    probabilities: Sequence[float] | None = None,
) -> Iterator[Dispatch | Arrival]:
    """Yield the events of Anarchic FL's protocol: in each round `cohort` clients, each on one of the last few models.

    A round lasts until its slowest client has finished. In the first rounds there are fewer models to choose from.

    Args:
        clients: those that hold data.
        draws: of clients and running times.
        ages: stream for the choice of models.
        cohort: clients of a round, drawn without replacement.
        arrivals: number of arrivals after which the schedule ends.
        stale_models: a client starts from one of this number of last models, drawn uniformly; 1: synchronous.
        probabilities: of each client, for drawing one after the other in proportion; default uniform.

    Yields:
        Dispatches and arrivals.
    """
    rates = np.ones(len(clients)) if probabilities is None else np.asarray(probabilities)
    sequence = 0
    now = 0.0
    for number in range(-(-arrivals // cohort)):
        # Exponential times with these rates: the order of the smallest is a draw in proportion, without replacement.
        exponentials = draws.selection.standard_exponential(len(clients)) / rates
        started = []
        for place in np.argsort(exponentials, kind="stable")[:cohort]:
            client = clients[place]
            finish = now + draws.running_time(client)
            yield Dispatch(now, sequence, client, int(ages.integers(min(stale_models, number + 1))), finish)
            started.append(Arrival(finish, sequence, client))
            sequence += 1
        started.sort(key=lambda arrival: (arrival.time, arrival.sequence))
        yield from started[: arrivals - number * cohort]
        now = started[-1].time


def make_schedule(
    spec: RuleSpec, seed: int, config: SimConfig, clients: Sequence[int], delays: DelayLaw | None = None
) -> Iterator[Dispatch | Arrival]:
    """Return the schedule of a run. With a synchronous rule a new cohort starts when the last one has finished.

    Args:
        spec: the rule.
        seed: of the run.
        config: the settings.
        clients: those that hold data.
        delays: law of the running times; None: that of the settings.

    Returns:
        Dispatches and arrivals in the order of virtual time.

    Raises:
        ConfigError: there are too few clients with data.
    """
    synchronous = spec.name in SYNCHRONOUS
    cohort = synchronous or config.protocol == "rounds"
    concurrency, refill = (spec.build().buffer_size,) * 2 if cohort else (config.concurrency, config.refill)
    if concurrency > len(clients):
        raise ConfigError(
            f"concurrency is {concurrency}, but only {len(clients)} of {config.num_clients} "
            f"clients hold data with seed {seed}"
        )
    draws = Draws.of(delay_law(config.delays) if delays is None else delays, config.num_clients, seed)
    if config.protocol == "rounds":
        probabilities = SAMPLING[config.sampling]
        if probabilities is not None and len(probabilities) != len(clients):
            raise ConfigError(f"sampling '{config.sampling}' is for {len(probabilities)} clients, not {len(clients)}")
        models, ages = 1 if synchronous else config.stale_models, random_stream(seed, StreamPurpose.STALE_MODELS)
        return schedule_rounds(clients, draws, ages, concurrency, config.arrivals, models, probabilities)
    blocked = config.selection == "blocked-until-pass-ends"
    return schedule_events(clients, draws, concurrency, config.arrivals, refill, blocked)
