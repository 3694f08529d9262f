"""The staleness that a law of running times causes, found by running the schedule without training anything."""

from dataclasses import dataclass

import numpy as np

from afflux.sim.clients.schedule import Dispatch, schedule_events
from afflux.sim.workload.delays import DelayLaw
from afflux.sim.workload.random_streams import StreamPurpose, random_stream


@dataclass(frozen=True)
class Staleness:
    """Server steps between a client's pull and the step that its update joins."""

    largest: int
    """Largest over all arrivals: tau_max of CA2FL and FADAS."""
    mean: float
    """Mean over all arrivals: CA2FL's tau_avg."""
    mean_largest: float
    """Mean over steps of the largest staleness in the step: FADAS's tau_avg."""
    time: float
    """Virtual time of the last step, in the law's unit."""


def simulate_staleness(
    law: DelayLaw,
    *,
    num_clients: int,
    concurrency: int,
    buffer_size: int,
    steps: int,
    refill: int | None = None,
    seed: int = 0,
) -> Staleness:
    """Return the staleness in a run of the event simulator.

    Args:
        law: of the running times.
        num_clients: N; all hold data.
        concurrency: M_c, clients that train at once.
        buffer_size: M, arrivals per server step.
        steps: T, server steps.
        refill: new clients start when this number have finished. None: `buffer_size`, as in CA2FL and FADAS; 1: at
            once.
        seed: of the run.

    Returns:
        The staleness of a run with this seed and these settings.
    """
    events = schedule_events(
        range(num_clients),
        concurrency=concurrency,
        arrivals=steps * buffer_size,
        delay=law(num_clients, random_stream(seed, StreamPurpose.DELAY_CLIENTS)),
        selection=random_stream(seed, StreamPurpose.SELECTION),
        times=random_stream(seed, StreamPurpose.DELAY_TIMES),
        refill=buffer_size if refill is None else refill,
    )
    pulled: dict[int, int] = {}
    staleness: list[int] = []
    for event in events:
        version = len(staleness) // buffer_size
        if isinstance(event, Dispatch):
            pulled[event.sequence] = version
        else:
            staleness.append(version - pulled.pop(event.sequence))
    by_step = np.array(staleness).reshape(steps, buffer_size)
    return Staleness(int(by_step.max()), float(by_step.mean()), float(by_step.max(axis=1).mean()), event.time)
