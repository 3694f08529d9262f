"""The staleness of a law's arrivals, by the schedule of the simulator and without training."""

from dataclasses import dataclass, field

import numpy as np

from afflux.sim.clients.schedule import Dispatch, Draws, schedule_events
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.delays import DelayLaw
from afflux.sim.workload.selection import UniformSelection


@dataclass(frozen=True)
class StalenessSummary:
    """Server steps between a client's pull and the step that its update joins."""

    largest: int  #: Largest over all arrivals: tau_max of CA2FL and FADAS.
    mean: float  #: Mean over all arrivals: CA2FL's tau_avg.
    mean_largest: float  #: Mean over steps of the largest staleness in the step: FADAS's tau_avg.
    time: float  #: Virtual time of the last step, in the law's unit.
    by_step: np.ndarray = field(compare=False, repr=False)  #: Of each arrival: (steps, buffer_size), int64.


def simulate_staleness(
    law: DelayLaw,
    *,
    num_clients: int,
    concurrency: int,
    buffer_size: int,
    steps: int,
    refill: int | None = None,
    seed: int = 0,
) -> StalenessSummary:
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
        Draws.of(law, num_clients, seed, UniformSelection(), SimConfig()),
        concurrency=concurrency,
        arrivals=steps * buffer_size,
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
    largest = by_step.max(axis=1)
    return StalenessSummary(int(largest.max()), float(by_step.mean()), float(largest.mean()), event.time, by_step)
