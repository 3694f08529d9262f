"""afflux's simulation of a workload, `afflux.lab.Simulation`, in one process."""

from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from io import StringIO

import numpy as np

from bench.rows.simulators.workload import RATE, STEPS, MakeModel, Run, Workload, data_of, seeded


def no_evaluation(module: object) -> tuple[float, float]:
    return 0.0, 0.0


def ours(work: Workload, *, compile: bool = False) -> Callable[[], Run]:
    """Return runs of FedBuff; the setup of a run is timed, too."""
    from afflux.lab import Simulation
    from afflux.sim import sgd

    made = Simulation(
        seeded(work.make_model),
        [data_of(client) for client in range(work.clients)],
        sgd(RATE, steps=STEPS, batch_size=work.batch_size),
        no_evaluation,
        rules=f"fedbuff:buffer_size={work.buffer_size}",
        concurrency=work.concurrency,
        arrivals=work.updates,
        eval_every=work.updates,
        compile=compile,
    )

    def run() -> np.ndarray:
        (result,) = made.run()
        return result.params

    return lambda: run


def ours_compiled(work: Workload) -> Callable[[], Run]:
    """Return the same runs with compiled steps. The C++ compiler has run before; a run only traces the step."""
    compile_step(work.make_model, work.batch_size)
    return ours(work, compile=True)


@cache
def compile_step(make_model: MakeModel, batch_size: int) -> None:
    """Make one run; afterwards this process has the compiled step."""
    with redirect_stderr(StringIO()):
        ours(Workload(make_model, 1, 1, 1, 1, batch_size), compile=True)()()


def no_compiler() -> str | None:
    """Return why steps cannot be compiled here; None if they can."""
    from afflux.ops.errors import ConfigError
    from afflux.sim.clients.compiled_training import require_compiler

    try:
        require_compiler()
    except ConfigError as error:
        return str(error)
    return None
