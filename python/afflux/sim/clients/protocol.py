"""From the settings to the schedule of a run."""

from collections.abc import Iterator, Sequence

from afflux.rules import SYNCHRONOUS
from afflux.sim.clients.schedule import SAMPLING, Arrival, Dispatch, rounds, schedule
from afflux.sim.errors import ConfigError
from afflux.sim.workload.config import RuleSpec, SimConfig
from afflux.sim.workload.delays import DELAYS
from afflux.sim.workload.random_streams import Purpose, stream


def events_of(
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
