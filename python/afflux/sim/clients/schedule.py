"""The discrete-event loop: the times at which clients start training and finish.

The schedule does not depend on models, except if the selection of clients reads results: one seed gives every rule the
same dispatches and delays.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.ops.validation import as_float, brief, zero_dim
from afflux.rules import SYNCHRONOUS
from afflux.rules.specs import RuleSpec
from afflux.sim.errors import note_on_errors
from afflux.sim.workload.availability import Fate, ReadyTimes, availability_law, dropout_law
from afflux.sim.workload.config import SAMPLING, SimConfig, concurrency_steps
from afflux.sim.workload.delays import Delay, DelayLaw, delay_law
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.selection import Population, UniformSelection, selection_law

#: Dispatches in a row whose results are lost, after which a run ends with an error.
MOST_LOST = 10_000


class Dispatch(NamedTuple):
    """A client pulls the model and starts training."""

    time: float
    sequence: int
    client: int
    age: int = 0  #: age of the model that the client pulls: 0 is the newest, 1 the one before it, ...
    finish: float = 0.0  #: time of the arrival of its result


class Arrival(NamedTuple):
    """The result of dispatch number `sequence` reaches the server."""

    time: float
    sequence: int
    client: int
    dispatched: float = 0.0  #: time of its dispatch


class Dropout(NamedTuple):
    """Dispatch number `sequence`, whose result the server never gets: nothing trains, and no version is held for it."""

    time: float
    sequence: int
    client: int
    fate: Fate
    freed: float | None  #: when the server gives it up, and its place to another client; None: never


Event: TypeAlias = Dispatch | Dropout | Arrival


class Draws(NamedTuple):
    """The random choices of a schedule."""

    delay: Delay  #: law of the running times
    selection: np.random.Generator  #: for the choice of clients
    times: np.random.Generator  #: for the running times
    law: UniformSelection = UniformSelection()  #: of the choice of clients
    takes_now: bool = False  #: whether the law of the running times takes the time of the dispatch
    trace: Callable[[int], ReadyTimes] | None = None  #: when a client is there; None: always
    fate: Callable[[float], tuple[float, Fate | None]] | None = None  #: `Dropouts.fate`; None: no client drops out
    timeout: float = inf

    @classmethod
    def of(cls, law: DelayLaw, num_clients: int, seed: int, selection: UniformSelection, config: SimConfig) -> "Draws":
        """Return those of a run with these laws; of `config` the availability, the dropouts and the timeout count."""
        with note_on_errors("while the function of delays was called"):
            delay = law(num_clients, random_stream(seed, StreamPurpose.DELAY_CLIENTS))
        if not callable(delay):
            raise ConfigError(f"delays: the law is {brief(delay)}, must be a function (client, rng) -> running time")
        picks, times = (random_stream(seed, purpose) for purpose in (selection.purpose, StreamPurpose.DELAY_TIMES))
        takes_now = False
        with suppress(TypeError, ValueError):  # a function in C has no signature
            takes_now = "now" in inspect.signature(delay).parameters
        of_presence = (StreamPurpose.AVAILABILITY, StreamPurpose.DROPOUT)
        devices, fates = (random_stream(seed, purpose) for purpose in of_presence)
        availability, dropout = availability_law(config.availability), dropout_law(config.dropout)
        trace = None if availability is None else availability(num_clients, devices)
        fate = None if dropout is None else partial(dropout.fate, rng=fates)
        return cls(delay, picks, times, selection, takes_now, trace, fate, config.timeout or inf)

    def ready(self, client: int, now: float) -> float:
        """Return the first time, from `now` on, at which a client is there."""
        return now if self.trace is None else self.trace(client).next_ready(now)

    def outcome(self, client: int, now: float) -> tuple[float, Fate | None]:
        """Draw when a client finishes that starts now, and the fate of its result; None: the result arrives then."""
        duration, fate = self.running_time(client, now), None
        if self.fate is not None:
            duration, fate = self.fate(duration)
        finish = now + duration if self.trace is None else self.trace(client).finish(now, duration)
        return finish, fate or ("late" if finish > now + self.timeout else None)

    def running_time(self, client: int, now: float) -> float:
        """Draw the running time of a client; raise ConfigError if it is impossible, because a law may be the user's."""
        with note_on_errors(f"while the running time of client {client} was drawn"):
            drawn = self.delay(client, self.times, **({"now": now} if self.takes_now else {}))
        duration = as_float(zero_dim(drawn))
        if duration is None or not 0 <= duration < inf:
            must, shown = ("a number", brief(drawn)) if duration is None else ("0 or more and finite", duration)
            raise ConfigError(f"delays: the running time of client {client} is {shown}, must be {must}")
        return duration


def schedule_events(
    clients: Sequence[int], draws: Draws, concurrency: int | str, arrivals: int, refill: int = 1
) -> Iterator[Event]:
    """Yield dispatches and arrivals in the order of virtual time, until `arrivals` arrivals.

    A client that finishes is replaced by an idle one, itself included, which the law of selection chooses; a client
    that is away is set aside until it is there, and the law chooses again. Arrivals with equal finish times come in
    the order of dispatch. A law that reads results must be told of an arrival before the next event is drawn.

    Args:
        clients: the clients that hold data.
        draws: of clients, running times and dropouts.
        concurrency: number of clients that train at the same time, at most all; see `concurrency_steps`.
        arrivals: number of arrivals after which the schedule ends.
        refill: replacements start when this number of clients have finished. 1: at once; the buffer size: the loop of
            CA2FL and FADAS; `concurrency`: FedAvg's rounds. WKAFL's K-async law is K, with all P clients training at
            once: only the K clients that finished are idle, so they get the new model. A client that drops out is
            replaced at its timeout, so that a round gets all its arrivals.

    Yields:
        Dispatches and arrivals, `Dispatch` before the `Arrival` with the same sequence number; and a `Dropout` in the
        place of a dispatch whose result is lost.

    Raises:
        ConfigError: no result can arrive any more.
    """
    steps = concurrency_steps(concurrency)
    idle = list(clients)
    away: list[tuple[float, int]] = []  # a heap of idle clients, by the time at which they are there
    # A heap of what ends: time, sequence, client (-1: a step), and the time of the dispatch if its result arrives.
    ends: list[tuple[float, int, int, float | None]] = [(time, -1, -1, None) for time, _ in steps[1:]]
    sequence = done = busy = lost = 0
    now = 0.0
    while done < arrivals:
        while away and away[0][0] <= now:
            idle.append(heappop(away)[1])
        vacant = next(count for time, count in reversed(steps) if time <= now) - busy - done % refill
        while vacant > 0 and idle:
            # Swapping with the last entry makes the draw O(1); the order of `idle` is still deterministic.
            chosen = draws.law.place(idle, now, draws.selection)
            idle[chosen], idle[-1] = idle[-1], idle[chosen]
            client = idle.pop()
            if (ready := draws.ready(client, now)) > now:
                heappush(away, (ready, client))
                continue
            finish, fate = draws.outcome(client, now)
            if fate is None:
                yield Dispatch(now, sequence, client, finish=finish)
                heappush(ends, (finish, sequence, client, now))
            else:
                finish = now + draws.timeout
                yield Dropout(now, sequence, client, fate, finish if finish < inf else None)
                if finish < inf:
                    heappush(ends, (finish, sequence, client, None))
            sequence, busy, vacant = sequence + 1, busy + 1, vacant - 1
            lost = 0 if fate is None else lost + 1
        if lost > MOST_LOST or not (ends or (away and vacant > 0)):
            why = f"{busy} clients dropped out and keep their places; give a timeout"
            why = f"the last {lost} dispatches were lost" if ends else why
            raise ConfigError(f"after {done} arrivals, at time {now:g}, no result can arrive any more: {why}")
        if away and vacant > 0 and not (ends and ends[0][0] <= away[0][0]):
            now = away[0][0]
            continue
        now, number, client, dispatched = heappop(ends)
        busy -= client >= 0
        if dispatched is not None:
            yield Arrival(now, number, client, dispatched)
            draws.law.add_idle(client, idle)
            done += 1
        elif client >= 0:
            idle.append(client)


def schedule_rounds(
    clients: Sequence[int],
    draws: Draws,
    ages: np.random.Generator,
    cohort: int,
    arrivals: int,
    stale_models: int,
    probabilities: Sequence[float] | None = None,
) -> Iterator[Event]:
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
            finish = now + draws.running_time(client, now)
            yield Dispatch(now, sequence, client, int(ages.integers(min(stale_models, number + 1))), finish)
            started.append(Arrival(finish, sequence, client, now))
            sequence += 1
        started.sort(key=lambda arrival: (arrival.time, arrival.sequence))
        yield from started[: arrivals - number * cohort]
        now = started[-1].time


def make_schedule(
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    population: Population,
    delays: DelayLaw | None = None,
    selection: UniformSelection | None = None,
) -> Iterator[Event]:
    """Return the schedule of a run. With a synchronous rule a new cohort starts when the last one has finished.

    Args:
        spec: the rule.
        seed: of the run.
        config: the settings.
        population: the clients.
        delays: law of the running times; None: that of the settings.
        selection: the law of the settings, which the caller tells of arrivals if it reads them; None: made here.

    Returns:
        Dispatches, dropouts and arrivals in the order of virtual time.

    Raises:
        ConfigError: there are too few clients with data.
    """
    clients, synchronous = population.clients, spec.name in SYNCHRONOUS
    cohort = spec.build().buffer_size if synchronous or config.protocol == "rounds" else 0
    concurrency, refill = (cohort or config.concurrency), (cohort or config.refill)
    if max(count for _, count in concurrency_steps(concurrency)) > len(clients):
        raise ConfigError(
            f"concurrency is {concurrency}, but only {len(clients)} of {config.num_clients} "
            f"clients hold data with seed {seed}"
        )
    selection = selection or selection_law(config.selection)
    law = delay_law(config.delays) if delays is None else delays
    draws = Draws.of(law, config.num_clients, seed, selection, config)
    if config.protocol == "rounds":
        probabilities = SAMPLING[config.sampling]
        if probabilities is not None and len(probabilities) != len(clients):
            raise ConfigError(f"sampling '{config.sampling}' is for {len(probabilities)} clients, not {len(clients)}")
        models, ages = 1 if synchronous else config.stale_models, random_stream(seed, StreamPurpose.STALE_MODELS)
        return schedule_rounds(clients, draws, ages, cohort, config.arrivals, models, probabilities)
    selection.begin(population, draws.selection)
    return schedule_events(clients, draws, concurrency, config.arrivals, refill)
