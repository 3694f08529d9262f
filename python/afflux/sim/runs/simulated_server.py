"""The server of one rule in a simulation: it handles a stream of pulls and updates."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from afflux import __version__
from afflux.aggregation.reports import Pulled, Receipt
from afflux.rules.rule import Rule
from afflux.server.server import Server
from afflux.sim.clients.validation_gradient import ValidationGradient
from afflux.sim.errors import ConfigError, DivergedError, TrainingError
from afflux.sim.results import audit_log
from afflux.sim.results.run_history import Progress, RunHistory, RunProgress
from afflux.sim.results.run_result import RunResult, params_sha256
from afflux.sim.results.tensorboard import TensorBoardWriter
from afflux.sim.runs.evaluations import Evaluations
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.workers import Workers
from afflux.sim.workload.config import UNLIMITED
from afflux.sim.workload.ignored_settings import unread_by_rules
from afflux.sim.workload.inputs import package_versions
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.rule_files import code_digests
from afflux.sim.workload.rule_specs import RuleSpec, needs_validation_gradient

_LOGGER = logging.getLogger("afflux")
#: Faulty arrivals after which a run ends: so many at its start, or so many in a row later.
FIRST_FAULTS, FAULTS_IN_A_ROW = 10, 100


class PullEvent(NamedTuple):
    """A client pulls a model and starts training: dispatch number `sequence`."""

    sequence: int
    after: int  #: the client pulls the model after this number of arrivals
    oldest: int  #: no later event pulls a model as of fewer arrivals


class UpdateEvent(NamedTuple):
    """The update of dispatch number `sequence`, the same for every server that handles the stream."""

    number: int  #: number of arrivals before this one
    sequence: int
    dispatched_after: int  #: `PullEvent.after`
    client: int
    time: float
    update: np.ndarray  #: (d,) float32, trained - pulled params
    num_examples: int
    loss: float
    steps: int
    buffers: np.ndarray | None = None  #: the client's buffers, if the model has any
    fault: str = ""  #: see `TrainingResult.fault`


def feed_servers(
    events: Iterable[PullEvent | UpdateEvent], servers: "Sequence[SimulatedServer]", progress: Progress | None
) -> None:
    """Pass each event to all servers in turn; each server has its own versions.

    `progress`, if it is not None, is called after each update with the progress of the first server.
    """
    for event in events:
        if isinstance(event, PullEvent):
            for server in servers:
                server.handle_pull(event)
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


def _printable(text: str) -> str:
    """Return a text of one line, as an audit log can hold it."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+", " ", text)


class SimulatedServer:
    """A server of one rule, the history of its run, and its audit log."""

    def __init__(
        self,
        spec: RuleSpec,
        setup: SimulationSetup,
        arrivals: int,
        leader: str = "",
        new_server: Callable[[Rule], Server] | None = None,
        history: RunHistory | None = None,
    ) -> None:
        """Make the server.

        Args:
            spec: the rule.
            setup: data, clients and initial params.
            arrivals: of the whole run.
            leader: label of the rule from whose params the clients train; empty: this one.
            new_server: makes the server; default in memory.
            history: of the server that `new_server` returns, if that is not a new one.

        Raises:
            ConfigError: the run has fewer arrivals than one round of the rule.
        """
        self.spec = spec
        self.leader = leader
        self._setup = setup
        self._total = arrivals
        rule = spec.build()
        setup.check_rule(rule)
        if arrivals < rule.buffer_size:
            raise ConfigError(f"arrivals is {arrivals}, but {spec.label} steps after {rule.buffer_size}")
        self.server = (new_server or setup.new_server)(rule)
        self._validation = None
        if needs_validation_gradient(rule):
            config, rng = setup.config, random_stream(setup.seed, StreamPurpose.VALIDATION)
            self._validation = ValidationGradient(
                self.server, setup.trainer, setup.num_validation, config.validation, config.refresh_every, rng
            )
        self.log: audit_log.AuditLogWriter | None = None
        self.metrics: TensorBoardWriter | None = None
        self._evaluations = Evaluations(setup, self.server)
        if history is None:
            self._evaluations.start(0, 0.0)
            history = RunHistory(list(self._evaluations.ended(wait=True)))
        self.history = history
        self._staleness = sum(self.history.staleness)
        self._fault_kind: type[TrainingError] = TrainingError
        self._models: dict[int, Pulled] = {}
        self._pulled: dict[int, Pulled] = {}

    def restore_models(self, models: dict[int, Pulled], pulled: dict[int, Pulled]) -> None:
        """Continue with these models.

        `models` may still be pulled, and are named by the number of arrivals before them. `pulled` are named by their
        dispatch.
        """
        self._models, self._pulled = models, pulled

    def evaluate_in(self, workers: Workers | None) -> None:
        """Let worker processes, if there are any, make the later evaluations, in parallel with training."""
        self._evaluations.workers = workers

    def progress(self) -> RunProgress:
        """Return the progress of the run; the accuracy is that of the last evaluation that has ended."""
        self.add_evaluations(wait=False)
        config, history, version = self._setup.config, self.history, self.server.version
        arrivals, last = len(history.staleness), history.evaluations[-1]
        limits = ((arrivals, self._total), (version, config.rounds), (history.time, config.virtual_time))
        shares = [reached / limit for reached, limit in limits if 0 < limit < UNLIMITED]
        mean = self._staleness / arrivals if arrivals else math.nan
        return RunProgress(arrivals, version, history.time, last.accuracy, mean, max(shares, default=math.nan))

    def handle_pull(self, event: PullEvent) -> None:
        """Hold the version that the client of this dispatch pulls."""
        models = self._models
        models[len(self.history.staleness)] = self.server.pull()
        while (first := next(iter(models))) < event.oldest:  # the oldest models come first
            del models[first]
        self._pulled[event.sequence] = models[event.after]

    def handle_update(self, event: UpdateEvent) -> None:
        """Push one update, which the server converts to the kind of the rule.

        Raises:
            TrainingError: the training has failed, or the loss or the vector is not finite; and the setting `faults` is
                raise, or too many arrivals are faulty for the run to go on.
        """
        start = self._pulled.pop(event.sequence)
        receipt = self.server.push(
            client=event.client,
            version=start,
            update=event.update,
            num_examples=event.num_examples or 1,  # 0 is no fault
            loss=event.loss if math.isfinite(event.loss) else math.nan,
            client_lr=self._setup.config.client_lr,
            local_steps=event.steps or 1,
            buffers=event.buffers,
        )
        assert receipt.staleness is not None
        if self._validation is not None:
            self._validation.refresh()
        history = self.history
        history.add_arrival(event.client, receipt)
        fault = _printable(event.fault or receipt.reason) if receipt.status == "faulty" else ""
        if fault:
            self._add_fault(event, fault)
        self._staleness += receipt.staleness
        history.time = event.time
        if self.log is not None:
            self._write(self.log, event, start.version, receipt, fault)
        if self.metrics is not None and receipt.report is not None:
            for report in (receipt.report, *receipt.more):
                self.metrics.add_round(report)
        arrivals = event.number + 1
        if arrivals % self._setup.config.eval_every == 0 or arrivals == self._total:
            self._evaluate(arrivals, event.time)

    def _add_fault(self, event: UpdateEvent, reason: str) -> None:
        """Add a faulty arrival to the history, which has counted it; raise TrainingError if it ends the run."""
        history, label = self.history, f"{self.spec.label}, seed {self._setup.seed}"
        text = f"{label}: client {event.client} failed to train at arrival {event.number + 1}: {reason}"
        if not event.fault:
            text = (
                f"{label}: client {event.client} diverged at arrival {event.number + 1} (loss {event.loss:g}): "
                f"{reason}; lower client_lr or server_lr, or look for values in its data that are not finite"
            )
        if not history.first_fault:
            history.first_fault = text
            if self._setup.config.faults == "record":
                _LOGGER.warning("%s; such arrivals are counted as faulty, and the run goes on", text)
        self._fault_kind = TrainingError if event.fault else DivergedError
        if self._setup.config.faults == "raise":
            raise self._fault_kind(text)
        row = history.faults_in_a_row
        if row >= (FIRST_FAULTS if row == len(history.staleness) else FAULTS_IN_A_ROW):
            self._raise_fault()

    def _raise_fault(self) -> None:
        history = self.history
        count = f"{history.decisions['faulty']} of {len(history.staleness)} arrivals are faulty"
        raise self._fault_kind(f"{history.first_fault}; {count}, the last {history.faults_in_a_row} in a row")

    def result(self) -> RunResult:
        """Return the result of the run, and write the end line of its log.

        Raises:
            TrainingError: all arrivals are faulty.
        """
        history = self.history
        if faulty := history.decisions.get("faulty", 0):
            if faulty == len(history.staleness):
                self._raise_fault()
            _LOGGER.warning(
                "%s, seed %d: %d of %d arrivals are faulty; the audit log and decisions count them",
                *(self.spec.label, self._setup.seed, faulty, len(history.staleness)),
            )
        self.add_evaluations()
        if history.evaluations[-1].arrivals < len(history.staleness):  # the run has ended before its last arrival
            self._evaluate(len(history.staleness), history.time)
            self.add_evaluations()
        for name in ("accuracy", "loss"):
            if all(math.isnan(getattr(evaluation, name)) for evaluation in history.evaluations):
                _LOGGER.warning(
                    "%s, seed %d: the %s of every evaluation is nan; look at the evaluation and its data",
                    *(self.spec.label, self._setup.seed, name),
                )
        unread = unread_by_rules([self.spec])
        result = RunResult(
            spec=self.spec,
            seed=self._setup.seed,
            evaluations=tuple(history.evaluations),
            staleness=np.array(history.staleness, dtype=np.int64),
            round_staleness=np.array(history.round_staleness, dtype=np.int64),
            server_seconds=np.array(history.seconds),
            state_bytes=self.server.state_bytes,
            num_clients=len(self._setup.clients),
            params=np.array(self.server.params),
            leader=self.leader,
            clients=np.array(history.clients, dtype=np.int64),
            decisions=history.decisions,
            totals=history.totals,
            settings={name: value for name, value in self._setup.settings.items() if name not in unread},
            division=self._setup.division,
            options=self.spec.all_options(),
            parts=self.server.rule.to_config(),
        )
        if self.log is not None:
            self.log.write(audit_log.EndLine(len(history.staleness), self.server.version, result.digest))
        return result

    def log_header(self, updates: str | None) -> audit_log.Header:
        """Return the first line of this rule's log; `updates` names the file of the kept updates."""
        setup, rule = self._setup, self.server.rule
        return audit_log.Header(
            format=audit_log.FORMAT,
            format_version=audit_log.FORMAT_VERSION,
            afflux=__version__,
            label=self.spec.label,
            rule=self.spec.name,
            options=self.spec.plain_options(),
            kind=rule.kind,
            buffer_size=rule.buffer_size,
            d=len(setup.initial_params),
            seed=setup.seed,
            num_clients=len(setup.clients),
            client_lr=setup.config.client_lr,
            leader=self.leader or self.spec.label,
            updates=updates,
            first_params_sha256=params_sha256(setup.initial_params),
            config=setup.config.recorded(),
            code=code_digests(self.spec.name, setup.config.task) or msgspec.UNSET,
            inputs=dict(setup.inputs) or msgspec.UNSET,
            versions={name: text for name, text in package_versions().items() if name != "afflux"},
        )

    def _write(
        self, log: audit_log.AuditLogWriter, event: UpdateEvent, version: int, receipt: Receipt, fault: str
    ) -> None:
        log.write(
            audit_log.ArrivalLine(
                number=event.number,
                client=event.client,
                dispatched_after=event.dispatched_after,
                version=version,
                staleness=receipt.staleness or 0,
                examples=event.num_examples,
                loss=event.loss,
                steps=event.steps,
                status=receipt.status,
                time=event.time,
                update=event.number if log.header.updates is not None else None,
                reason=fault or msgspec.UNSET,
            )
        )
        if receipt.report is not None:
            for report in (receipt.report, *receipt.more):
                log.write_round(report)

    def _evaluate(self, arrivals: int, time: float) -> None:
        self._evaluations.start(arrivals, time, self.history.evaluations[-1])
        self.add_evaluations(wait=self._setup.config.stop_at_target)

    def add_evaluations(self, wait: bool = True) -> None:
        """Add the evaluations that have ended to the history. With `wait`, wait for all that were started."""
        for evaluation in self._evaluations.ended(wait):
            self.history.evaluations.append(evaluation)
            if self.metrics is not None:
                self.metrics.add_evaluation(evaluation)

    @property
    def ended(self) -> bool:
        """Whether the run has reached the number of rounds or the target at which it stops."""
        config, history = self._setup.config, self.history
        if config.rounds and self.server.version >= config.rounds:
            return True
        return config.stop_at_target and history.evaluations[-1].accuracy >= config.target
