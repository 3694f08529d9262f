"""What a run records on top of its loop: evaluations, progress, and the log and the result of each rule."""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from afflux.lab.results.run_history import Progress, RunHistory, RunProgress
from afflux.lab.results.run_result import PLACE, ClientEvaluation, Evaluation, RunResult
from afflux.lab.runs.run_record import RunRecord
from afflux.lab.runs.setup import RunSetup
from afflux.lab.runs.workers import WorkerPool
from afflux.rules.specs import RuleSpec
from afflux.server.server import Server
from afflux.sim.clients.schedule import Dropout
from afflux.sim.clients.training import HandedInVectors
from afflux.sim.loop import EventLoop, LoopEvent, PushedUpdate
from afflux.sim.workload.config import UNLIMITED
from afflux.sim.workload.random_streams import StreamPurpose, random_stream

_LOGGER = logging.getLogger("afflux")


class _StartedEvaluation(NamedTuple):
    """An evaluation that is not yet in the history; worker processes evaluate in parallel with training."""

    place: tuple[int, int, float]  #: arrivals, version, virtual time
    figures: "Future[tuple[float, ...]]"
    round_means: dict[str, float]  #: `RunRecord.take_round_means`


class RecordedServer:
    """A server of one rule, to which a loop pushes, and its record; the server's models are evaluated."""

    def __init__(
        self, spec: RuleSpec, setup: RunSetup, server: Server, leader: str, history: RunHistory | None
    ) -> None:
        """Begin the record of a new server, or continue that of another one.

        Args:
            spec: the rule.
            setup: data, clients and initial params.
            server: of this rule.
            leader: label of the rule from whose params the clients train; empty: this one.
            history: of a server that is not new, else None.
        """
        self.server, self._setup, config = server, setup, setup.config
        self._handed_in = None
        if server.rule.needs.handed_in:
            rng = random_stream(setup.seed, StreamPurpose.VALIDATION)
            self._handed_in = HandedInVectors(
                server, setup.trainer, setup.num_validation, config.validation, config.refresh_every, rng
            )
        #: Processes that train, and that evaluate later models; None: this process.
        self.workers: WorkerPool | None = None
        self._names = tuple(metric.name for metric in setup.metrics)
        self._started: deque[_StartedEvaluation] = deque()
        if history is None:
            values = self._evaluated().result()
            first = Evaluation(0, self.server.version, 0.0, *values, names=self._names)
            config.check_unit(first.score, setup.metrics[0])
            history = RunHistory([first])
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

    def add_event(self, event: LoopEvent, place: int = 0) -> None:
        """Record an event of a loop, in which this server has the index `place`.

        Raises:
            TrainingError: the training has failed, or the loss or the vector is not finite; and the setting `faults` is
                raise, or too many arrivals are faulty for the run to go on.
        """
        config = self._setup.config
        if isinstance(event, Dropout):
            self.record.add_dropout(event)
        if not isinstance(event, PushedUpdate):
            return
        if self._handed_in is not None:
            self._handed_in.refresh()
        self.record.add_arrival(event, place)
        arrivals = event.number + 1
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
        self._started.append(_StartedEvaluation(place, figures, means))

    def _evaluated(self) -> "Future[tuple[float, ...]]":
        model = self.server.pull()
        if self.workers is not None:
            return self.workers.evaluate(model)
        return _known(self._setup.trainer.evaluate(model.params, model.buffers))

    def add_evaluations(self, wait: bool = True) -> None:
        """Add the evaluations that have ended to the history, in their order.

        With `wait`, wait for all evaluations that were started.

        Raises:
            ConfigError: as `Trainer.evaluate`, and `SimConfig.check_unit`.
            WorkerError: a worker has failed.
        """
        started = self._started
        while started and (wait or started[0].figures.done()):
            place, figures, round_means = started[0]
            evaluation = Evaluation(*place, *figures.result(), names=self._names)
            self._setup.config.check_unit(evaluation.score, self._setup.metrics[0])
            started.popleft()
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
        self.record.check_arrivals()
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


def record_events(
    loop: EventLoop, servers: Sequence[RecordedServer], progress: Progress | None, after_each: Callable[[], None]
) -> None:
    """Record all events of a loop.

    Args:
        loop: of these servers, in the same order.
        servers: each has its own record.
        progress: called after each arrival with the progress of the first server, and once more at an earlier end.
        after_each: called when an event has been recorded.
    """
    for event in loop:
        for place, server in enumerate(servers):
            server.add_event(event, place)
        if progress is not None and isinstance(event, PushedUpdate):
            progress(servers[0].progress())
        after_each()
    if progress is not None:
        last = servers[0].progress()
        if last.arrivals and not last.finished:
            progress(last._replace(done=1.0))
