"""FLGo's simulation of a workload: its FedBuff in the virtual time of its latency simulator."""

import importlib
import io
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from bench.rows.simulators.workload import EXAMPLES, RATE, STEPS, Run, Simulator, Workload, flat, seeded
from bench.spec.libraries import find
from bench.spec.optional_torch import torch

FLGO_MODULES = ("torch", "flgo", "flgo.algorithm.fedbuff", "flgo.benchmark.partition", "flgo.simulator.base")
FLGO_TASK = "bench.rows.simulators.flgo_task"
OPTIONS: dict[str, Any] = {
    "learning_rate": RATE,
    "num_steps": STEPS,
    "train_holdout": 0.0,
    "eval_interval": -1,
    "num_rounds": 10**9,
    "sample": "uniform_available",  # otherwise FLGo draws clients that already train, and drops them
}
QUIET = {"no_tqdm": True, "no_log_console": True, "log_level": "ERROR"}


@cache
def folder() -> TemporaryDirectory[str]:
    """Return the folder of FLGo's files, which is removed when the process ends."""
    return TemporaryDirectory(prefix="afflux-flgo-", ignore_cleanup_errors=True)


@contextmanager
def in_folder() -> Iterator[None]:
    """Change to FLGo's folder, silence its output and restore the random states afterwards.

    FLGo finds modules and files by the working directory, prints, and seeds the global random numbers.
    """
    path, states = folder().name, (random.getstate(), np.random.get_state())  # noqa: NPY002
    found_in, silenced = mock.patch.object(sys, "path", [path, *sys.path]), redirect_stdout(io.StringIO())
    try:
        with chdir(path), found_in, silenced, torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@cache
def task(loader: str, clients: int) -> str:
    """Make a task whose client i has the examples from i * EXAMPLES on, in batches of this loader; return its name."""
    flgo, name = find("flgo"), f"afflux_{loader}_{clients}"

    class InTurn(find("flgo.benchmark.partition").BasicPartitioner):  # type: ignore[misc]
        num_clients = clients

        def __call__(self, data: Any) -> list[list[int]]:
            return [list(range(client * EXAMPLES, (client + 1) * EXAMPLES)) for client in range(clients)]

    with in_folder():
        config = Path(f"{name}_config.py")
        config.write_text(f"from {FLGO_TASK} import *\nfrom {FLGO_TASK} import {loader} as DataLoader\n")
        importlib.invalidate_caches()
        benchmark = flgo.gen_benchmark_from_file(name, str(config), data_type="general")
        flgo.gen_task({"benchmark": {"name": benchmark}, "partitioner": InTurn()}, f"{name}_task")
    return f"{name}_task"


@cache
def latencies() -> type[Any]:
    """Return FLGo's simulator, with latencies by which one update arrives at each tick, so that no tick is idle."""

    class Latencies(find("flgo.simulator.base").BasicSimulator):  # type: ignore[misc]
        def initialize(self) -> None:
            self.trained = 0
            self.taken: set[int] = set()

        def update_client_responsiveness(self, client_ids: list[Any]) -> None:
            """Set the latency of these clients; FLGo calls this function when a client has trained."""
            now = self.gv.clock.current_time
            for client in client_ids:
                at = now + 1
                while at in self.taken:
                    at += 1
                self.taken.add(at)
                self.set_variable([client], "latency", [at - now])
                self.trained += 1

    return Latencies


def flgo(loader: str) -> Simulator:
    """Return FLGo's simulation with this loader of `flgo_task`."""

    def simulator(work: Workload) -> Callable[[], Run]:
        algorithm, name = find("flgo.algorithm.fedbuff"), task(loader, work.clients)
        options = OPTIONS | QUIET | {"batch_size": work.batch_size, "proportion": work.concurrency / work.clients}
        options |= {"algo_para": [work.buffer_size / work.clients, 1.0]}
        # Clients train when they get the model, so the first step comes after this number of trainings.
        updates = max(work.updates, work.concurrency + work.buffer_size)

        def new_run() -> Run:
            # FLGo modifies the classes that it gets.
            classes = {kind: type(kind, (getattr(algorithm, kind),), {}) for kind in ("Server", "Client")}
            fedbuff = SimpleNamespace(__name__="fedbuff", **classes)
            # FLGo makes a model in each of its operations on models, so this function must not seed.
            model = find("flgo").convert_model(work.make_model)
            with in_folder():
                runner = find("flgo").init(name, fedbuff, dict(options), model, Simulator=latencies())
            runner.model.model.load_state_dict(seeded(work.make_model).state_dict())
            simulated = runner.gv.simulator
            runner.register_exit_condition(lambda server: simulated.trained >= updates)

            def run() -> np.ndarray:
                with in_folder():
                    runner.run()
                assert simulated.trained == updates
                return flat(runner.model)

            return run

        return new_run

    return simulator
