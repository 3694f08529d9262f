"""The record of the run of one rule: its audit log, its event files, its faulty arrivals and its result."""

import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from afflux import __version__
from afflux.lab.results import audit_log
from afflux.lab.results.finished_runs import package_versions
from afflux.lab.results.model_file import FOLDER, constants_sha256, write_model
from afflux.lab.results.run_history import OnEvaluation, RunHistory, TrackedRun
from afflux.lab.results.run_result import Evaluation, RunResult, params_sha256
from afflux.lab.runs.setup import RunSetup
from afflux.lab.tasks.ignored_settings import unread_by_rules
from afflux.rules.files import code_digests
from afflux.rules.specs import RuleSpec
from afflux.server.server import Server
from afflux.sim.clients.schedule import Dropout
from afflux.sim.errors import DivergedError, TrainingError, note_on_errors
from afflux.sim.loop import PushedUpdate
from afflux.sim.workload.config import OF_PRESENCE
from afflux.sim.workload.evaluation import CLASSIFICATION

_LOGGER = logging.getLogger("afflux")
#: Faulty arrivals after which a run ends: so many at its start, or so many in a row later.
FIRST_FAULTS, FAULTS_IN_A_ROW = 10, 100


class RunRecord:
    """The record of one rule and one seed."""

    def __init__(self, spec: RuleSpec, setup: RunSetup, leader: str, server: Server, history: RunHistory) -> None:
        """Begin the record, or continue that of `history`; `leader` is empty if the clients train from this rule."""
        self.spec = spec
        self.title = f"{spec.label}, seed {setup.seed}"
        self.sum_of_staleness = sum(history.staleness)
        self.log: audit_log.AuditLogWriter | None = None
        self.on_evaluation: OnEvaluation | None = None
        self._setup, self._leader, self._server, self._history = setup, leader, server, history
        self._resumed_after = len(history.staleness)
        self._logs_dispatches = not {*OF_PRESENCE}.isdisjoint(setup.config.changed())
        self._round_sums: dict[str, float] = {}
        self._rounds = 0
        self._fault_kind: type[TrainingError] = TrainingError

    def open(self, output: Path, files: ExitStack, header: audit_log.Header | None = None, size: int = 0) -> None:
        """Open the files of the record; `files` closes them.

        Args:
            output: the folders.
            files: see above.
            header: of the log that is continued; None: a new one.
            size: bytes after which the log is continued; 0: a new one.
        """
        stem = audit_log.file_stem(self.spec.label, self._setup.seed)
        log = audit_log.AuditLogWriter(output / f"{stem}.jsonl", header or self._header(), size)
        self.log = files.enter_context(log)
        self._model_file = output.parent / FOLDER / f"{stem}.safetensors"

    def add_arrival(self, pushed: PushedUpdate, place: int) -> None:
        """Add an arrival, and the rounds that it completed; `place` is the index of this server in the loop.

        Raises:
            TrainingError: see `RecordedServer.add_event`.
        """
        history, log, event, trained = self._history, self.log, pushed.event, pushed.trained
        receipt = pushed.receipts[place]
        assert receipt.staleness is not None
        history.add_arrival(event.client, receipt.status, receipt.staleness)
        fault = _printable(trained.fault or receipt.reason) if receipt.status == "faulty" else ""
        if fault:
            self._add_fault(pushed, fault)
        self.sum_of_staleness += receipt.staleness
        history.time = event.time
        if log is not None:
            version, dispatched = pushed.versions[place], event.dispatched if self._logs_dispatches else msgspec.UNSET
            facts = pushed.number, event.client, pushed.sent.after, version, receipt.staleness
            training = trained.num_examples, trained.loss, trained.steps, receipt.status, event.time
            log.write(audit_log.ArrivalLine(*facts, *training, reason=fault or msgspec.UNSET, dispatched=dispatched))
        if (report := receipt.report) is not None:
            history.add_round(report, report.seconds)
            if log is not None:
                log.write_round(report)
            if self.on_evaluation is not None:
                for name, value in report.metrics().items():
                    self._round_sums[name] = self._round_sums.get(name, 0.0) + value
                self._rounds += 1

    def add_dropout(self, event: Dropout) -> None:
        """Add a dispatch whose result never arrives."""
        self._history.add_dropout()
        if self.log is not None:
            facts = event.client, len(self._history.staleness), event.time, event.fate, event.freed
            self.log.write(audit_log.DropoutLine(*facts))

    def _save_model(self) -> Path:
        """Write the server's model into the run folder, and return the file."""
        model, pulled = self._setup.model, self._server.pull()
        model.load(pulled.params, pulled.buffers)
        write_model(self._model_file, model.module, model.layout.roles)
        return self._model_file

    def take_round_means(self) -> dict[str, float]:
        """Return the means of `Report.metrics` over the rounds since the last call: many runs have a round an arrival.

        An evaluation takes them when it starts: other rounds follow before it ends in a worker process.
        """
        sums, rounds = self._round_sums, self._rounds
        self._round_sums, self._rounds = {}, 0
        return {f"round/{name}": value / rounds for name, value in sums.items() if name != "version"}

    def add_evaluation(self, evaluation: Evaluation, round_means: dict[str, float]) -> None:
        """Add an evaluation to the history, and call `on_evaluation` with its numbers and those of its rounds."""
        self._history.evaluations.append(evaluation)
        if self.on_evaluation is None:
            return
        metrics: dict[str, float] = {"arrivals": evaluation.arrivals}
        metrics |= {f"test/{name}": getattr(evaluation, name) for name in evaluation.names}
        metrics |= {f"run/{name}": getattr(evaluation, name) for name in ("version", "virtual_time")}
        metrics |= round_means
        seed, label = self._setup.seed, self.spec.label
        run = TrackedRun(label, seed, audit_log.file_stem(label, seed), self._settings(), self.spec.all_options())
        with note_on_errors(f"in on_evaluation, after {evaluation.arrivals} arrivals of {self.title}"):
            self.on_evaluation(run._replace(resumed_after=self._resumed_after), metrics)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that the run reads."""
        unread = unread_by_rules([self.spec])
        return {name: value for name, value in self._setup.settings.items() if name not in unread}

    def _add_fault(self, pushed: PushedUpdate, reason: str) -> None:
        """Add a faulty arrival to the history, which has counted it; raise TrainingError if it ends the run."""
        history, label, raises = self._history, self.title, self._setup.config.faults == "raise"
        client, fault = pushed.event.client, pushed.trained.fault
        text = f"{label}: client {client} failed to train at arrival {pushed.number + 1}: {reason}"
        if not fault:
            what = reason.removeprefix("[push] ").replace(f"client {client}'s ", "its ").partition(", must")[0]
            advice = "lower client_lr or server_lr, or look for values in its data that are not finite"
            text = f"{label}: client {client} diverged at arrival {pushed.number + 1}: {what}; {advice}"
        if not history.first_fault:
            history.first_fault = text
            if not raises:
                _LOGGER.warning("%s; such arrivals are counted as faulty, and the run continues", text)
        self._fault_kind = TrainingError if fault else DivergedError
        if raises:
            raise self._fault_kind(text)
        row = history.faults_in_a_row
        if row >= (FIRST_FAULTS if row == len(history.staleness) else FAULTS_IN_A_ROW):
            self._raise_fault()

    def _raise_fault(self) -> None:
        history = self._history
        count = f"{history.decisions['faulty']} of {len(history.staleness)} arrivals are faulty"
        raise self._fault_kind(f"{history.first_fault}; {count}, the last {history.faults_in_a_row} in a row")

    def check_arrivals(self) -> None:
        """Warn of faulty and of many replaced arrivals at the end of a run; raise TrainingError if all are faulty."""
        counts, arrivals = self._history.decisions, len(self._history.staleness)
        if faulty := counts.get("faulty", 0):
            if faulty == arrivals:
                self._raise_fault()
            text = "%s: %d of %d arrivals are faulty; the audit log and decisions count them"
            _LOGGER.warning(text, self.title, faulty, arrivals)
        if (replaced := counts.get("replaced", 0)) > arrivals / 4:
            text = "%s: %d of %d arrivals replaced an earlier one of their client: compare rules at equal --rounds"
            _LOGGER.warning(text, self.title, replaced, arrivals)

    def result(self) -> RunResult:
        """Return the result of the run, and write the end line of its log."""
        history, setup, server = self._history, self._setup, self._server
        model = setup.model
        buffers = None if model.initial_buffers is None else np.array(server.pull().buffers)
        result = RunResult(
            spec=self.spec,
            seed=setup.seed,
            **history.result_fields(),
            state_bytes=server.state_bytes,
            num_clients=len(setup.population.clients),
            params=np.array(server.params),
            digest=params_sha256(server.params),
            leader=self._leader,
            settings=self._settings(),
            division=setup.division,
            options=self.spec.all_options(),
            parts=server.rule.to_config(),
            first_params_sha256=params_sha256(setup.model.initial_params),
            metrics=setup.metrics,
            buffers=buffers,
            buffers_digest="" if buffers is None else params_sha256(buffers, "<f8"),
            layout=model.layout,
            constants=constants_sha256(model.module, model.layout.roles),
            inputs=setup.inputs,
            num_params=len(server.params),
            model_file=None if self.log is None else self._save_model(),
        )
        if self.log is not None:
            digests = result.digest, result.buffers_digest or msgspec.UNSET
            self.log.write(audit_log.EndLine(len(history.staleness), server.version, *digests))
        return result

    def _header(self) -> audit_log.Header:
        """Return the first line of the log."""
        setup, rule = self._setup, self._server.rule
        return audit_log.Header(
            format=audit_log.FORMAT,
            format_version=audit_log.FORMAT_VERSION,
            afflux=__version__,
            label=self.spec.label,
            rule=self.spec.name,
            options=self.spec.plain_options(),
            kind=rule.kind,
            buffer_size=rule.buffer_size,
            d=len(setup.model.initial_params),
            seed=setup.seed,
            num_clients=len(setup.population.clients),
            client_lr=setup.config.client_lr,
            leader=self._leader or self.spec.label,
            first_params_sha256=params_sha256(setup.model.initial_params),
            config=setup.config.recorded(),
            code=code_digests(self.spec.name, setup.config.task, setup.config.selection) or msgspec.UNSET,
            inputs=dict(setup.inputs) or msgspec.UNSET,
            versions={name: text for name, text in package_versions().items() if name != "afflux"},
            metrics=msgspec.UNSET if setup.metrics == CLASSIFICATION else setup.metrics,
        )


def _printable(text: str) -> str:
    """Return a text of one line, as an audit log can hold it."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+", " ", text)
