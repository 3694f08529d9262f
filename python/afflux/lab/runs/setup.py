"""The setup of a run, with what is recorded of it: the settings that it reads, digests of its inputs, and more."""

from collections.abc import Mapping, Sequence
from typing import Any

from afflux.lab.tasks.ignored_settings import refuse_ignored_settings, settings_read
from afflux.lab.tasks.inputs import input_digests
from afflux.lab.tasks.registry import build_task, task_function
from afflux.sim.setup import SimulationSetup
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.task import Partitioned, Task


class RunSetup(SimulationSetup):
    """The setup of a run whose task the settings name, or which is given."""

    def __init__(self, config: SimConfig, seed: int, task: Task | None = None, digests: bool = False) -> None:
        """Load the data and divide it among the clients.

        Args:
            config: the settings.
            seed: of all random numbers.
            task: the task of the clients; None: the task in the settings.
            digests: whether the digests of the inputs are computed.

        Raises:
            ConfigError: see `SimulationSetup`; or a setting that nothing reads was changed.
        """
        function = None
        if task is None:
            task, function = build_task(config), task_function(config.task)
        else:
            refuse_ignored_settings(config, config.changed(), task, None)
        super().__init__(config, seed, task)
        config, task, data = self.config, self.task, self.data
        #: Those that runs of this task read.
        self.settings: Mapping[str, Any] = settings_read(config, task, function)
        division = task.clients.division if isinstance(task.clients, Partitioned) else {}
        self.division: Mapping[str, Any] = {"num_clients": len(data)} | division  #: see `RunResult.division`
        #: See `input_digests`; empty unless they were asked for.
        self.inputs: Mapping[str, str] = input_digests(config, task, data, self.model.module) if digests else {}
        self.metrics = tuple(task.metrics)  #: of the task
        clients = self.population.clients
        #: The clients that are evaluated each, in ascending order.
        self.sample = () if task.evaluate_client is None else _sample(clients, config.fairness_clients, seed)


def _sample(clients: Sequence[int], most: int, seed: int) -> Sequence[int]:
    stream = random_stream(seed, StreamPurpose.CLIENT_EVALUATION)
    places = stream.choice(len(clients), min(most, len(clients)), replace=False)
    return [clients[place] for place in sorted(places.tolist())]
