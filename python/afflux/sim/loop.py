"""Asynchronous federated learning in virtual time: clients pull models and train; their updates are pushed to servers.

`EventLoop` yields what has happened, event by event. Between two of its items it can be saved (`state`), and continued
by another process (`restore`). What is measured, written or printed is the caller's.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from afflux.aggregation.reports import Pulled, Receipt
from afflux.ops.errors import ConfigError
from afflux.server.server import Server
from afflux.sim.clients.control_variates import ControlVariates
from afflux.sim.clients.schedule import Arrival, Dispatch, Dropout, Event
from afflux.sim.clients.training import SentModel, Training, TrainingResult
from afflux.sim.workload.config import Count
from afflux.sim.workload.selection import ClientResult, TrainingFacts, UniformSelection


class PushedUpdate(NamedTuple):
    """An update that has arrived, after all servers have handled it."""

    number: int  #: number of arrivals before this one
    event: Arrival
    sent: SentModel  #: the model from which the client trained
    trained: TrainingResult  #: its arrays are valid until the next item of the loop
    versions: tuple[int, ...]  #: from which the client trained, one of each server
    receipts: tuple[Receipt, ...]  #: of the pushes, one of each server


LoopEvent: TypeAlias = Dispatch | Dropout | PushedUpdate


class LoopState(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a loop of one server between two events, without arrays; params are named by their version."""

    events: Count
    arrivals: Count
    training: list[tuple[Count, Count, Count, Count]]  #: sequence, client, version and `SentModel.after`
    models: list[tuple[Count, Count]]  #: version and `SentModel.after`
    #: What a selection that reads results was told of each arrival: the last fields of `ClientResult`.
    results: list[TrainingFacts] = []


class _Snapshot(NamedTuple):
    """What a client may pull."""

    models: tuple[Pulled, ...]  #: the newest of each server
    control: np.ndarray | None  #: SCAFFOLD's c (d,)
    after: int  #: number of arrivals before


class EventLoop:
    """Clients train from the models of the first server; other servers get the same updates.

    Each server has its own versions, and thus its own staleness of an update. What a rule reads beside the updates,
    such as Zeno++'s gradient, is refreshed by the caller before the next item.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        training: Training,
        events: Callable[[], Iterable[Event]],
        *,
        client_lr: float,
        num_clients: int,
        stale_models: int = 1,
        controls: ControlVariates | None = None,
        selection: UniformSelection | None = None,
        attacks: Mapping[int, Callable[[np.ndarray], np.ndarray]] = MappingProxyType({}),
        ends: Callable[[Event], bool] = lambda event: False,
    ) -> None:
        """Make a loop.

        Args:
            servers: with the same initial params.
            training: where the clients train.
            events: returns the schedule, from its beginning, each time that it is called.
            client_lr: the learning rate of the clients.
            num_clients: the number of arrivals in a pass, for rules that take each client once per pass.
            stale_models: the number of last models that clients may pull (`Dispatch.age`).
            controls: of SCAFFOLD, empty; None: another client optimizer.
            selection: that of the schedule. If it has `observe`, this is called with the result of each arrival.
            attacks: by the numbers of the hostile clients, the vector that one pushes, as a function of its update.
            ends: whether the loop ends before this event.
        """
        self._servers, self._training, self._events, self._ends = servers, training, events, ends
        self._client_lr, self._num_clients, self._attacks = client_lr, num_clients, attacks
        self._controls, self._selection = controls, selection or UniformSelection()
        self._handled = self._arrivals = 0  # events, and the arrivals among them
        self._version = servers[0].version  # at the last step of `controls`
        self._results: list[TrainingFacts] = []
        self._snapshots: deque[_Snapshot] = deque(maxlen=stale_models)
        self._running: dict[int, tuple[SentModel, tuple[Pulled, ...]]] = {}  # trainings by sequence

    def __iter__(self) -> Iterator[LoopEvent]:
        """Yield each event after it was handled."""
        for event in self._remaining():
            if self._ends(event):
                return
            self._handled += 1
            if isinstance(event, Arrival):
                yield self._push(event)
                self._training.release(event.sequence)
                continue
            if isinstance(event, Dispatch):  # the result of a dropout never arrives: nothing is pulled or trained
                self._training.submit(event.sequence, event.finish, self._pull(event))
            yield event

    def _pull(self, event: Dispatch) -> SentModel:
        """Return the model that the client pulls: with age 0 the newest, with 1 the one that was pulled before it."""
        newest = tuple(server.pull() for server in self._servers)
        if self._snapshots and self._snapshots[-1].models[0].version == newest[0].version:
            self._snapshots.pop()  # same version: its snapshot is replaced, whose control and arrivals are older
        control = None if self._controls is None else self._controls.server
        self._snapshots.append(_Snapshot(newest, control, self._arrivals))
        models, control, after = self._snapshots[-1 - min(event.age, len(self._snapshots) - 1)]
        shift = None if self._controls is None or control is None else self._controls.shift(event.client, control)
        sent = SentModel(event.client, models[0], shift, after)
        self._running[event.sequence] = sent, models
        return sent

    def _push(self, event: Arrival) -> PushedUpdate:
        """Take the result of a training, and push it to the servers, which convert it to the kinds of their rules."""
        sent, models = self._running.pop(event.sequence)
        trained = self._training.take(event.sequence, sent)
        if (attack := self._attacks.get(sent.client)) is not None:
            trained = trained._replace(update=attack(trained.update))
        receipts = tuple(self._push_to(*pair, event, trained) for pair in zip(self._servers, models, strict=True))
        if self._controls is not None and sent.shift is not None and np.isfinite(trained.update).all():
            gradient = trained.update / np.float32(-self._client_lr * trained.steps)
            self._controls.record_gradient(sent.client, gradient, sent.shift)
            if (version := self._servers[0].version) != self._version:
                self._version = version
                self._controls.step()
        if self._selection.observe is not None:  # before it chooses the next client
            loss = trained.loss if trained.loss is not None and math.isfinite(trained.loss) else None
            is_finite = loss == trained.loss and bool(np.isfinite(trained.update).all())
            self._results.append((loss, trained.steps, trained.num_examples, bool(trained.fault) or not is_finite))
            self._selection.observe(ClientResult.of(event, self._results[-1]))
        self._arrivals += 1
        versions = tuple(model.version for model in models)
        return PushedUpdate(self._arrivals - 1, event, sent, trained, versions, receipts)

    def _push_to(self, server: Server, model: Pulled, event: Arrival, trained: TrainingResult) -> Receipt:
        # The server records that a training raised by an error about its loss.
        loss: Any = f"of a training that raised {trained.fault}" if trained.fault else trained.loss
        receipt = server.push(
            client=event.client,
            version=model,
            update=trained.update,
            num_examples=trained.num_examples or 1,  # a push with 0 examples would be "empty"
            loss=loss,
            client_lr=self._client_lr,
            local_steps=trained.steps or 1,
            buffers=trained.buffers,
        )
        # The clients' pass has ended; that of the server has not if the update of one of them was faulty.
        if server.rule.needs.passes and (self._arrivals + 1) % self._num_clients == 0:
            report = server.end_pass()
            receipt = receipt if report is None else receipt._replace(report=report)
        return receipt

    def _remaining(self) -> Iterator[Event]:
        """Return the events that were not handled, and begin the trainings that a restored loop has in progress.

        The earlier events are drawn again, because they depend on the seed alone, and not on models. A selection that
        reads results also gets the results of the earlier arrivals again.
        """
        events, dispatches = iter(self._events()), dict[int, Dispatch]()
        if self._selection.observe is not None and len(self._results) != self._arrivals:
            raise ConfigError(f"{len(self._results)} results of the selection, but {self._arrivals} arrivals")
        results = iter(self._results)
        for event in islice(events, self._handled):
            if isinstance(event, Dispatch):
                dispatches[event.sequence] = event
            elif isinstance(event, Arrival):
                del dispatches[event.sequence]
                if self._selection.observe is not None:
                    self._selection.observe(ClientResult.of(event, next(results)))
        clients = {sequence: sent.client for sequence, (sent, _) in self._running.items()}
        if clients != {sequence: dispatch.client for sequence, dispatch in dispatches.items()}:
            raise ConfigError("other clients train than in the run that was interrupted: another NumPy has made it")
        for sequence, (sent, _) in self._running.items():
            self._training.submit(sequence, dispatches[sequence].finish, sent)
        return events

    def state(self) -> LoopState:
        """Return the state of a loop of one server, except `state_arrays` and `older_versions`."""
        running = self._running.items()
        training = [(sequence, sent.client, sent.model.version, sent.after) for sequence, (sent, _) in running]
        models = [(models[0].version, after) for models, _, after in self._snapshots]
        return LoopState(self._handled, self._arrivals, training, models, self._results)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return SCAFFOLD's part of the state; empty for other client optimizers."""
        if self._controls is None:
            return {}
        shifts = [sent.shift for sent, _ in self._running.values()]
        arrays = {"sent": [control for _, control, _ in self._snapshots], "shifts": shifts}
        return self._controls.state_arrays() | {name: np.array(rows) for name, rows in arrays.items() if rows}

    def older_versions(self) -> list[Pulled]:
        """Return the versions of params that the state names, except the newest one."""
        models = [*(sent.model for sent, _ in self._running.values()), *(models[0] for models, _, _ in self._snapshots)]
        newest = self._servers[0].version
        return list({model.version: model for model in models if model.version != newest}.values())

    def restore(self, state: LoopState, arrays: Mapping[str, np.ndarray], versions: Mapping[int, Pulled]) -> None:
        """Continue from `state` and `state_arrays`, before the first item.

        Args:
            state: see `state`.
            arrays: see `state_arrays`.
            versions: the params that the state names, by version.
        """
        self._handled, self._arrivals, self._results = state.events, state.arrivals, list(state.results)
        controls, shifts = (iter(arrays.get(name, ())) for name in ("sent", "shifts"))
        self._snapshots.extend(_Snapshot((versions[v],), next(controls, None), after) for v, after in state.models)
        for sequence, client, version, after in state.training:
            sent = SentModel(client, versions[version], next(shifts, None), after)
            self._running[sequence] = sent, (sent.model,)
        if self._controls is not None:
            self._controls.restore(arrays)
