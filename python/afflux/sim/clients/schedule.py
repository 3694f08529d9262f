"""The discrete-event loop: who starts training when, and who finishes when.

The schedule does not look at models, so one seed gives every rule the same dispatches and delays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from afflux.rules import SYNCHRONOUS
from afflux.sim.errors import ConfigError
from afflux.sim.workload.config import SAMPLING, SimConfig
from afflux.sim.workload.delays import DELAYS, Delay
from afflux.sim.workload.random_streams import Purpose, stream
from afflux.sim.workload.rule_specs import RuleSpec


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A client pulls the model and starts training."""

    time: float
    sequence: int
    client: int
    age: int = 0
    """Which model it pulls: 0 is the newest, 1 the one before it, ..."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of dispatch number `sequence` reaches the server."""

    time: float
    sequence: int
    client: int


def schedule(
    clients: Sequence[int],
    *,
    concurrency: int,
    arrivals: int,
    delay: Delay,
    selection: np.random.Generator,
    times: np.random.Generator,
    refill: int = 1,
) -> Iterator[Dispatch | Arrival]:
    """Yield dispatches and arrivals in the order of virtual time, until `arrivals` arrivals.

    `concurrency` clients train at once. A client that finishes is replaced by one drawn uniformly
    from the idle ones (itself included), equal finish times arrive in the order of dispatch.
    Replacements start when `refill` clients have finished: 1 is at once, the buffer size is the
    loop that CA2FL and FADAS were run with, and all of `concurrency` are FedAvg's rounds.
    WKAFL's K-async law is `refill` K with all P clients at once: nobody else is idle, so that
    the new model goes to just those K who finished.
    """
    if not 1 <= concurrency <= len(clients):
        raise ValueError(f"[schedule] concurrency {concurrency} is not in 1..{len(clients)}")
    if not 1 <= refill <= concurrency:
        raise ValueError(f"[schedule] refill {refill} is not in 1..{concurrency}")
    idle = list(clients)
    training: list[tuple[float, int, int]] = []
    sequence = 0
    now = 0.0
    done = 0
    vacant = concurrency
    while done < arrivals:
        for _ in range(vacant):
            # Swapping with the last makes the draw O(1); the order of `idle` stays deterministic.
            chosen = int(selection.integers(len(idle)))
            idle[chosen], idle[-1] = idle[-1], idle[chosen]
            client = idle.pop()
            yield Dispatch(now, sequence, client)
            heappush(training, (now + delay(client, times), sequence, client))
            sequence += 1
        now, number, client = heappop(training)
        yield Arrival(now, number, client)
        idle.append(client)
        done += 1
        vacant = refill if done % refill == 0 else 0


def rounds(
    clients: Sequence[int],
    *,
    cohort: int,
    arrivals: int,
    stale_models: int,
    delay: Delay,
    selection: np.random.Generator,
    ages: np.random.Generator,
    times: np.random.Generator,
    probabilities: Sequence[float] | None = None,
) -> Iterator[Dispatch | Arrival]:
    """Anarchic FL's protocol: in each round `cohort` clients, each on one of the last few models.

    The clients are drawn without replacement, uniformly or one after the other in proportion to `probabilities`.
    Each starts from one of the last `stale_models` models, uniformly; 1 is synchronous. In the first rounds there are
    fewer models to choose from. A round lasts until its slowest client has finished.
    """
    if not 1 <= cohort <= len(clients):
        raise ValueError(f"[rounds] cohort {cohort} is not in 1..{len(clients)}")
    if probabilities is not None and len(probabilities) != len(clients):
        raise ValueError(f"[rounds] {len(probabilities)} probabilities for {len(clients)} clients")
    rates = np.ones(len(clients)) if probabilities is None else np.asarray(probabilities)
    sequence = 0
    now = 0.0
    for number in range(-(-arrivals // cohort)):
        # The first of exponential clocks that ring at these rates: drawing in proportion, without replacement.
        clocks = selection.standard_exponential(len(clients)) / rates
        started = []
        for place in np.argsort(clocks, kind="stable")[:cohort]:
            client = clients[place]
            yield Dispatch(now, sequence, client, int(ages.integers(min(stale_models, number + 1))))
            started.append(Arrival(now + delay(client, times), sequence, client))
            sequence += 1
        started.sort(key=lambda arrival: (arrival.time, arrival.sequence))
        yield from started[: arrivals - number * cohort]
        now = started[-1].time


def make_schedule(
    spec: RuleSpec, buffer_size: int, seed: int, config: SimConfig, clients: Sequence[int]
) -> Iterator[Dispatch | Arrival]:
    """The schedule of a run; raises ConfigError if it cannot be. A synchronous rule's cohort is waited for."""
    synchronous = spec.name in SYNCHRONOUS
    cohort = synchronous or config.protocol == "rounds"
    concurrency, refill = (buffer_size,) * 2 if cohort else (config.concurrency, config.refill)
    if concurrency > len(clients):
        raise ConfigError(
            f"concurrency is {concurrency}, but only {len(clients)} of {config.num_clients} "
            f"clients hold data with seed {seed}"
        )
    delay = DELAYS[config.delays](config.num_clients, stream(seed, Purpose.DELAY_CLIENTS))
    selection, times = stream(seed, Purpose.SELECTION), stream(seed, Purpose.DELAY_TIMES)
    if config.protocol == "rounds":
        probabilities = SAMPLING[config.sampling]
        if probabilities is not None and len(probabilities) != len(clients):
            raise ConfigError(f"sampling '{config.sampling}' is for {len(probabilities)} clients, not {len(clients)}")
        return rounds(
            clients,
            cohort=concurrency,
            arrivals=config.arrivals,
            stale_models=1 if synchronous else config.stale_models,
            delay=delay,
            selection=selection,
            ages=stream(seed, Purpose.STALE_MODELS),
            times=times,
            probabilities=probabilities,
        )
    return schedule(
        clients,
        concurrency=concurrency,
        arrivals=config.arrivals,
        delay=delay,
        selection=selection,
        times=times,
        refill=refill,
    )
