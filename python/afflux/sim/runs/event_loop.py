"""The rounds of a run, from top to bottom: clients pull models, train and push; the servers step and evaluate.

`TrainingStream.events` makes the events: dispatches, and updates of clients that train from the params of one rule.
`feed_servers` passes them to the server of each rule.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from afflux.aggregation.reports import Pulled
from afflux.ops.codecs import Codec
from afflux.ops.errors import ConfigError
from afflux.rules.rule import Rule
from afflux.rules.specs import RuleSpec, needs_validation_gradient
from afflux.server.server import Server
from afflux.sim import interrupts
from afflux.sim.clients.control_variates import ControlVariates
from afflux.sim.clients.schedule import Arrival, Dispatch, Dropout, Event
from afflux.sim.clients.training import SentModel, TrainingResult, ValidationGradient
from afflux.sim.results.audit_log import Count
from afflux.sim.results.run_history import Progress, RunHistory, RunProgress
from afflux.sim.results.run_result import PLACE, ClientEvaluation, Evaluation, RunResult
from afflux.sim.runs.run_record import RunRecord, UpdateEvent
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.workers import WorkerPool
from afflux.sim.workload.config import OF_PRESENCE, UNLIMITED
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.selection import ClientResult, TrainingFacts, selection_law

_LOGGER = logging.getLogger("afflux")


class PullEvent(NamedTuple):
    """A client pulls a model and starts training: dispatch number `sequence`."""

    sequence: int
    after: int  #: the client pulls the model after this number of arrivals
    oldest: int  #: no later event pulls a model as of fewer arrivals


StreamEvent: TypeAlias = PullEvent | UpdateEvent | Dropout


class StreamState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a `TrainingStream` between two events, without arrays; params are named by their version."""

    events: Count
    arrivals: Count
    training: list[tuple[Count, Count, Count, Count]]  #: sequence, client, version and `SentModel.after`
    models: list[tuple[Count, Count]]  #: version and `SentModel.after`
    #: What a selection that reads results was told of each arrival: the last fields of `ClientResult`.
    results: list[TrainingFacts] = []


class TrainingStream:
    """The events of clients that train from the params of `leader`, which must handle these events."""

    def __init__(self, setup: SimulationSetup, leader: "SimulatedServer") -> None:
        """Make the stream; the leader's worker processes train, if there are any, else this process, one by one."""
        config, seed = setup.config, setup.seed
        self._setup, self._leader, self._workers = setup, leader, leader.workers
        self._finish: dict[int, float] = {}
        self._training: dict[int, SentModel] = {}
        most = config.stale_models if config.protocol == "rounds" else 1
        #: The models that clients may still start from, with SCAFFOLD's c and the number of arrivals when each was the
        #: newest; older ones than the newest only for the protocol of rounds.
        self._models: deque[tuple[Pulled, np.ndarray | None, int]] = deque(maxlen=most)
        self._controls = None
        if config.client_optimizer == "scaffold":
            size, codec = len(setup.model.initial_params), Codec(config.control_codec)
            self._controls = ControlVariates(size, len(setup.population.clients), codec, seed)
        self._version = leader.server.version
        self._logs_dispatches = not {*OF_PRESENCE}.isdisjoint(config.changed())
        self._selection = selection_law(config.selection)
        self._results: list[TrainingFacts] = []
        self._events = self._arrivals = 0

    def events(self, after_each: Callable[[], None] = interrupts.raise_if_pending) -> Iterator[StreamEvent]:
        """Yield the remaining events; `after_each` is called when an event has been handled."""
        events, limit = self._schedule(), self._setup.config.virtual_time
        if self._workers is not None:
            for sequence, sent in self._training.items():
                self._workers.submit(sequence, self._finish[sequence], sent)
        for event in events:
            if self._leader.ended or 0 < limit < event.time:
                return
            client, sequence = event.client, event.sequence
            if isinstance(event, Dropout):
                yield event
            elif isinstance(event, Dispatch):
                sent = self._training[sequence] = self.pull(client, event.age)
                if self._workers is not None:
                    self._workers.submit(sequence, event.finish, sent)
                yield PullEvent(sequence, sent.after, self._models[0][2])
            else:
                sent = self._training.pop(sequence)
                trained = self._trained(sequence, sent)
                dispatched = event.dispatched if self._logs_dispatches else msgspec.UNSET
                yield UpdateEvent(self._arrivals, sequence, sent.after, client, event.time, trained, dispatched)
                self._record_result(sent, trained)
                self._tell_selection(event, trained)
                if self._workers is not None:
                    self._workers.release(sequence)
                self._arrivals += 1
            self._events += 1
            after_each()

    def pull(self, client: int, age: int = 0) -> SentModel:
        """Return what a client pulls: with age 0 the newest model, with 1 the one sent before it, ..."""
        newest = self._leader.server.pull()
        if self._models and self._models[-1][0].version == newest.version:
            self._models.pop()
        self._models.append((newest, None if self._controls is None else self._controls.server, self._arrivals))
        model, control, after = self._models[-1 - min(age, len(self._models) - 1)]
        if self._controls is None or control is None:
            return SentModel(client, model, None, after)
        return SentModel(client, model, self._controls.shift(client, control), after)

    def _trained(self, sequence: int, sent: SentModel) -> TrainingResult:
        trained = None if self._workers is None else self._workers.take(sequence)
        if trained is not None:
            return trained
        batches, model = random_stream(self._setup.seed, StreamPurpose.BATCHES, sequence), sent.model
        return self._setup.trainer.train(sent.client, model.params, batches, sent.shift, model.buffers)

    def _record_result(self, sent: SentModel, trained: TrainingResult) -> None:
        """Update SCAFFOLD's c_i after a push, and c if the server has stepped; a faulty result changes none."""
        if self._controls is None or sent.shift is None or not np.isfinite(trained.update).all():
            return
        gradient = trained.update / np.float32(-self._setup.config.client_lr * trained.steps)
        self._controls.record_gradient(sent.client, gradient, sent.shift)
        if (version := self._leader.server.version) != self._version:
            self._version = version
            self._controls.step()

    def _tell_selection(self, event: Arrival, trained: TrainingResult) -> None:
        """Tell a selection that reads results of an arrival, before it chooses the next client."""
        if self._selection.observe is not None:
            loss = trained.loss if trained.loss is not None and math.isfinite(trained.loss) else None
            is_finite = loss == trained.loss and bool(np.isfinite(trained.update).all())
            result = loss, trained.steps, trained.num_examples, bool(trained.fault) or not is_finite
            self._results.append(result)
            self._selection.observe(ClientResult.of(event, result))

    def _schedule(self) -> Iterator[Event]:
        """Return the remaining events.

        The earlier events are drawn again, because they depend on the seed alone, and not on models. A selection that
        reads results also gets the results of the earlier arrivals again.
        """
        events = self._setup.schedule(self._leader.record.spec, self._selection)
        training: dict[int, int] = {}
        if self._selection.observe is not None and len(self._results) != self._arrivals:
            raise ConfigError(f"{len(self._results)} results of the selection, but {self._arrivals} arrivals")
        results = iter(self._results)
        for event in islice(events, self._events):
            if isinstance(event, Dispatch):
                training[event.sequence] = event.client
                self._finish[event.sequence] = event.finish
            elif isinstance(event, Arrival):
                del training[event.sequence], self._finish[event.sequence]
                if self._selection.observe is not None:
                    self._selection.observe(ClientResult.of(event, next(results)))
        if training != {sequence: sent.client for sequence, sent in self._training.items()}:
            raise ConfigError("other clients train than in the run that was interrupted: another NumPy has made it")
        return events

    def state(self) -> StreamState:
        """Return the state, except `state_arrays`."""
        dispatches = self._training.items()
        training = [(sequence, sent.client, sent.model.version, sent.after) for sequence, sent in dispatches]
        models = [(model.version, after) for model, _, after in self._models]
        return StreamState(self._events, self._arrivals, training, models, self._results)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return SCAFFOLD's part of the state; empty for other client optimizers."""
        if self._controls is None:
            return {}
        held = {"sent": [c for _, c, _ in self._models], "shifts": [sent.shift for sent in self._training.values()]}
        return self._controls.state_arrays() | {name: np.array(rows) for name, rows in held.items() if rows}

    def older_versions(self) -> list[Pulled]:
        """Return the versions of params that the state names, except the newest one."""
        models = [sent.model for sent in self._training.values()]
        models += [model for model, _, _ in self._models]
        held = {model.version: model for model in models if model.version != self._leader.server.version}
        return list(held.values())

    def restore(self, state: StreamState, arrays: Mapping[str, np.ndarray], versions: Mapping[int, Pulled]) -> None:
        """Continue from `state` and `state_arrays`; `leader` then holds the models that its clients have pulled.

        Args:
            state: see `state`.
            arrays: see `state_arrays`.
            versions: the params that the state names, by version.

        Raises:
            ConfigError: a version is missing.
        """
        named = {version for _, _, version, _ in state.training} | {version for version, _ in state.models}
        if lost := sorted(named - versions.keys()):
            raise ConfigError(f"the store no longer keeps version {lost[0]} of params, from which clients train")
        self._events, self._arrivals, self._results = state.events, state.arrivals, list(state.results)
        sent, shifts = (iter(arrays.get(name, ())) for name in ("sent", "shifts"))
        self._models.extend((versions[version], next(sent, None), after) for version, after in state.models)
        for sequence, client, version, after in state.training:
            self._training[sequence] = SentModel(client, versions[version], next(shifts, None), after)
        if self._controls is not None:
            self._controls.restore(arrays)
        self._leader.models = {after: model for model, _, after in self._models}
        self._leader.pulled = {sequence: sent.model for sequence, sent in self._training.items()}


def feed_servers(
    events: Iterable[StreamEvent], servers: "Sequence[SimulatedServer]", progress: Progress | None
) -> None:
    """Pass each event to all servers in turn; each server has its own versions.

    `progress`, if it is not None, is called after each update with the progress of the first server.
    """
    for event in events:
        if not isinstance(event, UpdateEvent):
            for server in servers:
                server.handle_dispatch(event)
            continue
        for server in servers:
            server.handle_update(event)
        if progress is not None:
            progress(servers[0].progress())
    if progress is None:
        return
    ended = servers[0].progress()
    if ended.arrivals and not ended.finished:
        progress(ended._replace(done=1.0))


class _StartedEvaluation(NamedTuple):
    """An evaluation that is not yet in the history; worker processes evaluate in parallel with training."""

    place: tuple[int, int, float]  #: arrivals, version, virtual time
    figures: "Future[tuple[float, ...]]"
    round_means: dict[str, float]  #: `RunRecord.take_round_means`
    messages: tuple[int, int]  #: see `RunHistory.messages_at_evaluations`


class SimulatedServer:
    """A server of one rule: it handles a stream of pulls and updates, and its model is evaluated."""

    def __init__(
        self,
        spec: RuleSpec,
        setup: SimulationSetup,
        leader: str = "",
        new_server: Callable[[Rule], Server] | None = None,
        history: RunHistory | None = None,
    ) -> None:
        """Make the server.

        Args:
            spec: the rule.
            setup: data, clients and initial params.
            leader: label of the rule from whose params the clients train; empty: this one.
            new_server: makes the server; default in memory.
            history: of the server that `new_server` returns, if that is not a new one.

        Raises:
            ConfigError: the run has fewer arrivals than one round of the rule.
        """
        rule = spec.build()
        setup.check_rule(rule)
        config = setup.config
        if config.arrivals < rule.buffer_size:
            raise ConfigError(f"arrivals is {config.arrivals}, but {spec.label} steps after {rule.buffer_size}")
        self.server = (new_server or setup.new_server)(rule)
        self._validation = None
        if needs_validation_gradient(rule):
            rng = random_stream(setup.seed, StreamPurpose.VALIDATION)
            self._validation = ValidationGradient(
                self.server, setup.trainer, setup.num_validation, config.validation, config.refresh_every, rng
            )
        #: Processes that train, and that evaluate later models; None: this process.
        self.workers: WorkerPool | None = None
        self._setup = setup
        self._names = tuple(metric.name for metric in setup.metrics)
        self._started: deque[_StartedEvaluation] = deque()
        if history is None:
            values = self._evaluated().result()
            first = Evaluation(0, self.server.version, 0.0, *values, names=self._names)
            history = RunHistory([first], pulls=0, messages_at_evaluations=[(0, 0)])
        #: Models that may still be pulled, by the number of arrivals before them; the oldest ones come first.
        self.models: dict[int, Pulled] = {}
        self.pulled: dict[int, Pulled] = {}  #: The models from which clients train, by dispatch.
        self.history = history
        self.record = RunRecord(spec, setup, leader, self.server, history)  #: The audit log and the result of the run.

    def progress(self) -> RunProgress:
        """Return the progress of the run; the score is that of the last evaluation that has ended."""
        self.add_evaluations(wait=False)
        config, history, version = self._setup.config, self.history, self.server.version
        arrivals, last = len(history.staleness), history.evaluations[-1]
        limits = ((arrivals, config.arrivals), (version, config.rounds), (history.time, config.virtual_time))
        shares = [reached / limit for reached, limit in limits if 0 < limit < UNLIMITED]
        mean = self.record.sum_of_staleness / arrivals if arrivals else math.nan
        done, metric = max(shares, default=math.nan), self._setup.metrics[0]
        return RunProgress(arrivals, version, history.time, last.score, mean, done, metric.name, metric.unit)

    def handle_dispatch(self, event: PullEvent | Dropout) -> None:
        """Hold the version that the client of this dispatch pulls, unless its result never comes."""
        if self.history.pulls is not msgspec.UNSET:
            self.history.pulls += 1
        if isinstance(event, Dropout):
            self.record.add_dropout(event)
            return
        models = self.models
        models[len(self.history.staleness)] = self.server.pull()
        while (first := next(iter(models))) < event.oldest:
            del models[first]
        self.pulled[event.sequence] = models[event.after]

    def handle_update(self, event: UpdateEvent) -> None:
        """Push one update, which the server converts to the kind of the rule.

        Raises:
            TrainingError: the training has failed, or the loss or the vector is not finite; and the setting `faults` is
                raise, or too many arrivals are faulty for the run to go on.
        """
        start, config, trained = self.pulled.pop(event.sequence), self._setup.config, event.trained
        receipt = self.server.push(
            client=event.client,
            version=start,
            update=trained.update,
            num_examples=trained.num_examples or 1,  # 0 is no fault
            loss=trained.loss if trained.loss is None or math.isfinite(trained.loss) else math.nan,
            client_lr=config.client_lr,
            local_steps=trained.steps or 1,
            buffers=trained.buffers,
        )
        if self._validation is not None:
            self._validation.refresh()
        arrivals = event.number + 1
        # The clients' pass has ended; that of the server has not if the update of one of them was faulty.
        if self.server.rule.needs.passes and arrivals % len(self._setup.population.clients) == 0:
            report = self.server.end_pass()
            receipt = receipt if report is None else receipt._replace(report=report)
        self.record.add_arrival(event, start.version, receipt)
        if arrivals % config.eval_every == 0 or arrivals == config.arrivals:
            self._start_evaluation()
            self.add_evaluations(wait=config.stop_at_target)
        if config.fairness_every and arrivals % config.fairness_every == 0:
            self._evaluate_clients()

    def _evaluate_clients(self) -> None:
        """Add the evaluations of the sampled clients to the history, unless it has them."""
        setup, history, arrivals = self._setup, self.history, len(self.history.staleness)
        rows = history.client_evaluations or []
        if not setup.sample or (rows and rows[-1].arrivals == arrivals):
            return
        model = self.server.pull()
        for client in setup.sample:
            rng = random_stream(setup.seed, StreamPurpose.CLIENT_EVALUATION, arrivals, client)
            values = setup.trainer.evaluate_client(client, model.params, model.buffers, rng)
            rows += (ClientEvaluation(arrivals, client, *row) for row in values)
        history.client_evaluations = rows

    def _start_evaluation(self) -> None:
        """Evaluate the current model, unless it is that of the last evaluation."""
        history, version = self.history, self.server.version
        if self._started and self._started[-1].place[1] == version:
            figures = self._started[-1].figures
        elif not self._started and (last := history.evaluations[-1]).version == version:
            figures = _known(last[len(PLACE) :])
        else:
            figures = self._evaluated()
        means = self.record.take_round_means()
        place = len(history.staleness), version, history.time
        messages = len(history.staleness) + history.lost_uploads, history.pulls or 0
        self._started.append(_StartedEvaluation(place, figures, means, messages))

    def _evaluated(self) -> "Future[tuple[float, ...]]":
        model = self.server.pull()
        if self.workers is not None:
            return self.workers.evaluate(model)
        return _known(self._setup.trainer.evaluate(model.params, model.buffers))

    def add_evaluations(self, wait: bool = True) -> None:
        """Add the evaluations that have ended to the history, in their order.

        With `wait`, wait for all evaluations that were started.

        Raises:
            ConfigError: as `Trainer.evaluate`.
            WorkerError: a worker has failed.
        """
        started = self._started
        while started and (wait or started[0].figures.done()):
            place, figures, round_means, messages = started[0]
            evaluation = Evaluation(*place, *figures.result(), names=self._names)
            started.popleft()
            if self.history.messages_at_evaluations is not msgspec.UNSET:
                self.history.messages_at_evaluations.append(messages)
            self.record.add_evaluation(evaluation, round_means)

    @property
    def ended(self) -> bool:
        """Whether the run has reached the number of rounds or the target at which it stops."""
        history, version = self.history, self.server.version
        score, metric = history.evaluations[-1].score, self._setup.metrics[0]
        return self._setup.config.is_reached(len(history.staleness), version, score, metric)

    def result(self) -> RunResult:
        """Return the result of the run, and write the end line of its log; the last model is evaluated.

        Raises:
            TrainingError: all arrivals are faulty.
        """
        history = self.history
        self.record.check_faults()
        self.add_evaluations()
        if history.evaluations[-1].arrivals < len(history.staleness):  # the run has ended before its last arrival
            self._start_evaluation()
            self.add_evaluations()
        self._evaluate_clients()
        for name in self._names:
            if all(math.isnan(getattr(evaluation, name)) for evaluation in history.evaluations):
                text = "%s: the %s of every evaluation is nan; look at the evaluation and its data"
                _LOGGER.warning(text, self.record.title, name)
        return self.record.result()


def _known(values: tuple[float, ...]) -> "Future[tuple[float, ...]]":
    figures: Future[tuple[float, ...]] = Future()
    figures.set_result(values)
    return figures
