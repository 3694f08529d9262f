"""`afflux.sim.Simulation` of a workload, in one process."""

from collections.abc import Callable

import numpy as np

from afflux.bench.rows.simulators.workload import RATE, STEPS, Run, Workload, data_of, seeded


def no_evaluation(module: object) -> tuple[float, float]:
    return 0.0, 0.0


def ours(work: Workload) -> Callable[[], Run]:
    """FedBuff; the setup of a run is part of it."""
    from afflux.sim import Simulation, sgd

    made = Simulation(
        seeded(work.make_model),
        [data_of(client) for client in range(work.clients)],
        sgd(RATE, steps=STEPS, batch_size=work.batch_size),
        no_evaluation,
        rules=f"fedbuff:buffer_size={work.buffer_size}",
        concurrency=work.concurrency,
        arrivals=work.updates,
        eval_every=work.updates,
    )

    def run() -> np.ndarray:
        (result,) = made.run()
        return result.params

    return lambda: run
