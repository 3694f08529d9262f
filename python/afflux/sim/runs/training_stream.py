"""The events of clients that train from the params of one rule, and their state between two events."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from afflux.aggregation.reports import Pulled
from afflux.sim import interrupts
from afflux.sim.clients.model_broadcast import ModelBroadcast, SentModel
from afflux.sim.clients.schedule import Arrival, Dispatch
from afflux.sim.clients.training import TrainingResult
from afflux.sim.errors import ConfigError
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.simulated_server import PullEvent, SimulatedServer, UpdateEvent
from afflux.sim.runs.workers import Workers
from afflux.sim.workload.random_streams import StreamPurpose, StreamSeries


class TrainingStream:
    """The events of clients that train from the params of `leader`, which must handle these events."""

    def __init__(self, setup: SimulationSetup, leader: SimulatedServer, workers: Workers | None = None) -> None:
        """Make the stream.

        Args:
            setup: of the run.
            leader: the server from whose params the clients train.
            workers: processes that train; None: this process, one by one.
        """
        self._setup = setup
        self._workers = workers
        self._finish: dict[int, float] = {}
        self._streams = StreamSeries(setup.seed, StreamPurpose.BATCHES)
        self._leader = leader
        self._broadcast = ModelBroadcast(leader.server, setup.config, len(setup.clients), setup.seed)
        self._training: dict[int, SentModel] = {}
        self._events = 0
        self._arrivals = 0

    def events(self, after_each: Callable[[], None] = interrupts.raise_if_pending) -> Iterator[PullEvent | UpdateEvent]:
        """Yield the remaining events; `after_each` is called when an event has been handled."""
        events = self._schedule()
        if self._workers is not None:
            for sequence, sent in self._training.items():
                self._workers.submit(sequence, self._finish[sequence], sent)
        for event in events:
            if self._leader.ended or self._too_late(event):
                return
            client, sequence, number = event.client, event.sequence, self._arrivals
            if isinstance(event, Dispatch):
                sent = self._training[sequence] = self._broadcast.pull(client, event.age, number)
                if self._workers is not None:
                    self._workers.submit(sequence, event.finish, sent)
                yield PullEvent(sequence, sent.after, self._broadcast.oldest)
            else:
                sent = self._training.pop(sequence)
                trained = self._trained(sequence, sent)
                facts = (trained.update, trained.num_examples, trained.loss, trained.steps)
                yield UpdateEvent(
                    number, sequence, sent.after, client, event.time, *facts, trained.buffers, trained.fault
                )
                self._broadcast.record_result(sent, trained)
                if self._workers is not None:
                    self._workers.release(sequence)
                self._arrivals += 1
            self._events += 1
            after_each()

    def _trained(self, sequence: int, sent: SentModel) -> TrainingResult:
        if self._workers is not None:
            trained = self._workers.take(sequence)
            if trained is not None:
                return trained
        batches, model = self._streams.stream(sequence), sent.model
        return self._setup.trainer.train(sent.client, model.params, batches, sent.shift, model.buffers)

    def _too_late(self, event: Dispatch | Arrival) -> bool:
        limit = self._setup.config.virtual_time
        return bool(limit) and isinstance(event, Arrival) and event.time > limit

    def _schedule(self) -> Iterator[Dispatch | Arrival]:
        """Return the remaining events.

        The earlier events are drawn again, because they depend on the seed alone, and not on models.
        """
        events = self._setup.schedule(self._leader.spec)
        training: dict[int, int] = {}
        for event in islice(events, self._events):
            if isinstance(event, Dispatch):
                training[event.sequence] = event.client
                self._finish[event.sequence] = event.finish
            else:
                del training[event.sequence], self._finish[event.sequence]
        if training != {sequence: sent.client for sequence, sent in self._training.items()}:
            raise ConfigError("other clients train than in the run that was interrupted: another NumPy has made it")
        return events

    def state(self) -> dict[str, Any]:
        """Return the state, except `state_arrays`, in types that JSON has; params are named by their version."""
        training = [
            (sequence, sent.client, sent.model.version, sent.after) for sequence, sent in self._training.items()
        ]
        return {
            "events": self._events,
            "arrivals": self._arrivals,
            "training": training,
            "models": [(model.version, after) for model, _, after in self._broadcast.models],
        }

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return SCAFFOLD's part of the state; empty for other client optimizers."""
        shifts = [sent.shift for sent in self._training.values() if sent.shift is not None]
        arrays = self._broadcast.state_arrays()
        return arrays | {"shifts": np.stack(shifts)} if shifts else arrays

    def older_versions(self) -> list[Pulled]:
        """Return the versions of params that the state names, except the newest one."""
        models = [sent.model for sent in self._training.values()]
        models += [model for model, _, _ in self._broadcast.models]
        held = {model.version: model for model in models if model.version != self._leader.server.version}
        return list(held.values())

    def restore(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], versions: Mapping[int, Pulled]
    ) -> None:
        """Continue from `state` and `state_arrays`; `leader` then holds the models that its clients have pulled.

        Args:
            state: see `state`.
            arrays: see `state_arrays`.
            versions: the params that the state names, by version.

        Raises:
            ConfigError: a version is missing.
        """
        named = {version for _, _, version, _ in state["training"]} | {version for version, _ in state["models"]}
        if lost := sorted(named - versions.keys()):
            raise ConfigError(f"the store no longer keeps version {lost[0]} of params, from which clients train")
        self._events, self._arrivals = state["events"], state["arrivals"]
        shifts = iter(arrays.get("shifts", ()))
        for sequence, client, version, after in state["training"]:
            self._training[sequence] = SentModel(client, versions[version], next(shifts, None), after)
        self._broadcast.restore([(versions[version], after) for version, after in state["models"]], arrays)
        models = {after: model for model, _, after in self._broadcast.models}
        self._leader.restore_models(models, {sequence: sent.model for sequence, sent in self._training.items()})
