"""torch's autograd alone, on the same losses and gradients.

No simulator that trains through autograd can be faster.
"""

from collections.abc import Callable

import numpy as np

from bench.rows.simulators.workload import Run, Workload, data_of, flat, loss_of, seeded


def autograd_alone(work: Workload) -> Callable[[], Run]:
    """Return runs of forward and backward passes over prepared batches: no optimizer, no shuffling, no server."""
    module = seeded(work.make_model)
    batches = [
        [(x, y) for x, y in zip(*(part.split(work.batch_size) for part in data_of(client)), strict=True)]
        for client in range(work.clients)
    ]

    def run() -> np.ndarray:
        for update in range(work.updates):
            for x, y in batches[update % work.clients]:
                loss_of(module, x, y).backward()
                module.zero_grad()
        return flat(module)

    return lambda: run
