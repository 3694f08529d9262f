"""The results in a run folder."""

import csv
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from afflux.sim.errors import ConfigError
from afflux.sim.results.audit_log import FOLDER, AuditLog, Count, file_stem, read_audit_log
from afflux.sim.results.run_history import RunHistory
from afflux.sim.results.run_result import Evaluation, RunResult
from afflux.sim.results.simulation_results import SimulationResults
from afflux.sim.workload.rule_specs import JsonScalar, RuleSpec
from afflux.store.files import read_bytes

#: The most bytes of a file that is read as a whole.
MOST_BYTES = 1 << 30


class _Run(msgspec.Struct, frozen=True):
    """A run in summary.json."""

    rule: str
    seed: Count
    clients_with_data: Count
    state_bytes: float
    params_sha256: str
    server_ms: float | None = None


class _Rule(msgspec.Struct, frozen=True):
    """A rule in config.json."""

    label: str
    name: str
    options: dict[str, JsonScalar]
    parts: dict[str, Any]
    updates_of: str


class _Summary(msgspec.Struct, frozen=True):
    runs: list[_Run]


class _Config(msgspec.Struct, frozen=True):
    simulation: dict[str, Any]
    division: dict[str, Any]
    rules: list[_Rule]


@dataclass(frozen=True, eq=False)
class ReadRun(RunResult):
    """A run of a run folder, which holds no params, and of the server's seconds only the mean."""

    sha256: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the final params' bytes."""
        return self.sha256


def read_results(folder: Path | str) -> SimulationResults:
    """Read the results of the runs in a run folder, from its tables and audit logs; nothing is executed.

    Args:
        folder: of `Simulation.run(out=...)`, or of the command line.

    Returns:
        The runs that have ended, as they were written, but without params.

    Raises:
        ConfigError: a file is missing, or does not hold what a run writes.
    """
    folder = Path(folder)
    try:
        summary = msgspec.json.decode(read_bytes(folder / "summary.json", MOST_BYTES), type=_Summary)
        config = msgspec.json.decode(read_bytes(folder / "config.json", MOST_BYTES), type=_Config)
        evaluations: dict[tuple[str, int], list[Evaluation]] = {}
        for row in csv.DictReader(read_bytes(folder / "metrics.csv", MOST_BYTES).decode().splitlines()):
            time, accuracy, loss = (float(row[name]) for name in ("virtual_time", "accuracy", "loss"))
            evaluation = Evaluation(int(row["arrivals"]), int(row["version"]), time, accuracy, loss)
            evaluations.setdefault((row["rule"], int(row["seed"])), []).append(evaluation)
        rules = {rule.label: rule for rule in config.rules}
        runs, settings = list[RunResult](), None
        for run in summary.runs:
            log = read_audit_log(folder / FOLDER / f"{file_stem(run.rule, run.seed)}.jsonl")
            settings = log.header.settings(log.path)
            runs.append(_result(run, rules[run.rule], config, evaluations[run.rule, run.seed], log))
    except OSError as error:
        raise ConfigError(f"{folder} holds no results of a run: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder} holds results that no run has written: {error}") from None
    if settings is None:
        raise ConfigError(f"{folder} holds no results of a run")
    return SimulationResults(runs, settings)


def _result(run: _Run, rule: _Rule, config: _Config, evaluations: list[Evaluation], log: AuditLog) -> RunResult:
    history = RunHistory(evaluations)
    for arrival in log.arrivals:
        receipt: Any = SimpleNamespace(status=arrival.status, staleness=arrival.staleness, report=None)
        history.add_arrival(arrival.client, receipt)
    for line in log.rounds:
        weights = np.array(line.weights, np.float64)  # None becomes nan
        report: Any = SimpleNamespace(staleness=np.array(line.staleness), weights=weights, seconds=0.0)
        report.stepped, report.rejected = line.stepped, line.rejected
        history.add_round(report)
    history.seconds = [] if run.server_ms is None else [run.server_ms / 1e3]
    return ReadRun(
        spec=RuleSpec(rule.name, tuple(log.header.options.items()), rule.label),
        seed=run.seed,
        **history.result_fields(),
        state_bytes=int(run.state_bytes),
        num_clients=run.clients_with_data,
        params=np.zeros(0, np.float32),
        leader="" if rule.updates_of == rule.label else rule.updates_of,
        settings=config.simulation,
        division=config.division,
        options=rule.options,
        parts=rule.parts,
        first_params_sha256=log.header.first_params_sha256,
        sha256=run.params_sha256,
    )
