"""Trainings in groups: one call of `torch.func.vmap` makes those whose results are needed first."""

from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from afflux.sim.clients.model_broadcast import SentModel
from afflux.sim.clients.training import TrainingResult
from afflux.sim.clients.vmap_training import Start, VmapTrainer
from afflux.sim.errors import ConfigError
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.workload.random_streams import StreamPurpose
from afflux.sim.workload.stream_series import StreamSeries


@dataclass(frozen=True)
class Vmap:
    """Training of many clients in one call of `torch.func.vmap`, on a GPU or another device of torch.

    For `Simulation.run(workers=...)`. The clients have the same data, batches and delays as without it. The results
    differ in their last bits: the device adds in another order, and a run that is resumed forms other groups.
    """

    clients: int = 32
    """The most clients in one call; no more than train at the same time."""
    device: str = "cuda"
    """A device of torch: cuda, cuda:1, cpu, ..."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is invalid."""
        if self.clients < 1:
            raise ConfigError(f"clients of Vmap is {self.clients}, must be at least 1")
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device of Vmap is {self.device!r}: {error}") from None


class VmapGroups:
    """Trainings of one run in groups: `submit` at a dispatch, `take` at its arrival, `release` when handled."""

    def __init__(self, vmap: Vmap, setup: SimulationSetup) -> None:
        """Make the groups of one run.

        Raises:
            ConfigError: the device cannot be used, or the task has a training function of its own.
        """
        self._most = vmap.clients
        self._trainer = VmapTrainer(setup.model, setup.trainer, torch.device(vmap.device))
        self._streams = StreamSeries(setup.seed, StreamPurpose.BATCHES)
        self._known: dict[int, SentModel] = {}
        self._first: list[tuple[float, int]] = []  # a heap of finish and sequence
        self._done: dict[int, TrainingResult] = {}

    def submit(self, sequence: int, finish: float, sent: SentModel) -> None:
        """Add a training whose result is needed at virtual time `finish`."""
        self._known[sequence] = sent
        heappush(self._first, (finish, sequence))

    def take(self, sequence: int) -> TrainingResult:
        """Return the result of a training; train a group first if the result does not exist yet.

        Raises:
            ConfigError: vmap cannot train these clients.
        """
        if sequence not in self._done:
            self._train(sequence)
        return self._done.pop(sequence)

    def _train(self, needed: int) -> None:
        group = {needed: self._known.pop(needed)}
        while self._first and len(group) < self._most:
            _, sequence = heappop(self._first)
            if sequence in self._known:
                group[sequence] = self._known.pop(sequence)
        starts = [
            Start(sent.client, sent.model.params, self._streams.stream(sequence), sent.shift, sent.model.buffers)
            for sequence, sent in group.items()
        ]
        self._done |= dict(zip(group, self._trainer.train(starts), strict=True))

    def release(self, sequence: int) -> None:
        """Do nothing: the caller of `take` frees the result."""
