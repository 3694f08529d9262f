"""The progress of a run, and its history so far, which a checkpoint stores and `RunResult` is made from."""

import re
from collections.abc import Callable, Mapping
from math import inf
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field

from afflux.aggregation.reports import Report
from afflux.lab.results.audit_log import RoundLine
from afflux.lab.results.run_result import ClientEvaluation, Evaluation, RoundTotals
from afflux.sim.workload.config import Count
from afflux.sim.workload.evaluation import CLASSIFICATION

MOST_REASONS = 20  #: the most reasons of rejections that are counted separately
OTHER_REASONS = "other reasons"
LOST = "lost"  #: the decision that counts dispatches whose results never arrive
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class RunProgress(NamedTuple):
    """The progress of a run after an arrival."""

    arrivals: int
    version: int
    virtual_time: float
    score: float  #: of the last evaluation: its first metric
    mean_staleness: float  #: over the arrivals so far
    done: float  #: finished share of the run, for the limit that is nearest; 1 at its end; nan without a limit
    metric: str = CLASSIFICATION[0].name  #: of the score
    unit: str = CLASSIFICATION[0].unit

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.done >= 1


#: Called after each arrival, and once more at the end of a run that ends before its limits; may raise to stop it.
Progress = Callable[[RunProgress], None]
JobProgress = Callable[[int, RunProgress], None]  #: called with (index of the job, its progress)


class TrackedRun(NamedTuple):
    """A run, as `on_evaluation` gets it."""

    rule: str  #: label of the rule
    seed: int
    name: str  #: a text that is a file name, different for each run
    settings: Mapping[str, Any]  #: the settings that the run reads
    options: Mapping[str, Any]  #: all options of the rule
    resumed_after: int = 0  #: number of arrivals after which the run was resumed; its later evaluations come again


#: Called after each evaluation but the first one, with the run and its numbers by name; may raise to stop the run.
OnEvaluation = Callable[[TrackedRun, dict[str, float]], None]


class RunHistory(Struct):
    """Evaluations, arrivals and rounds of a run so far, in types that JSON has; an older afflux kept more numbers."""

    evaluations: Annotated[list[Evaluation], Meta(min_length=1)]
    clients: list[Count] = field(default_factory=list)  #: of each arrival
    staleness: list[Count] = field(default_factory=list)  #: of each arrival
    decisions: dict[str, Count] = field(default_factory=dict)  #: number of arrivals by decision: joined, ...
    round_staleness: list[Count] = field(default_factory=list)  #: the largest staleness of each round
    seconds: list[float] = field(default_factory=list)  #: of each round
    totals: RoundTotals = field(default_factory=RoundTotals)
    time: float = 0.0  #: virtual time of the last arrival
    first_fault: str = ""  #: the message about the first faulty arrival
    faults_in_a_row: Count = 0  #: number of faulty arrivals since the last one that was not
    client_evaluations: list[ClientEvaluation] | UnsetType = UNSET  #: of a task that evaluates clients
    cpu_seconds: float = 0.0  #: of the run in its own process, up to the checkpoint

    def add_arrival(self, client: int, status: str, staleness: int) -> None:
        """Add one arrival, without the rounds that it completed."""
        self.clients.append(client)
        self.staleness.append(staleness)
        self.decisions[status] = self.decisions.get(status, 0) + 1
        self.faults_in_a_row = self.faults_in_a_row + 1 if status == "faulty" else 0

    def add_dropout(self) -> None:
        """Add one dispatch whose result never arrives."""
        self.decisions[LOST] = self.decisions.get(LOST, 0) + 1

    def result_fields(self) -> dict[str, Any]:
        """Return the fields of `RunResult` that the history holds."""
        return {
            "evaluations": tuple(self.evaluations),
            "staleness": np.array(self.staleness, np.int64),
            "round_staleness": np.array(self.round_staleness, np.int64),
            "server_seconds": np.array(self.seconds),
            "clients": np.array(self.clients, np.int64),
            "decisions": self.decisions,
            "totals": self.totals,
            "client_evaluations": tuple(self.client_evaluations or ()),
        }

    def add_round(self, report: Report | RoundLine, seconds: float = 0.0) -> None:
        """Add one round, which took so many seconds."""
        staleness = np.array(report.staleness).tolist()
        weights = np.array(report.weights, np.float64).tolist()  # None becomes nan
        self.round_staleness.append(max(staleness))
        self.seconds.append(seconds)
        add_weights(self.totals, staleness, weights)
        self.totals.skipped += not report.stepped
        rejected = self.totals.rejected
        for reason in filter(None, report.rejected):
            # A reason names numbers of its arrival ("cosine 0.12 below 0.3"): the audit log has them.
            kind = _NUMBER.sub("#", reason)
            if kind not in rejected and len(rejected) >= MOST_REASONS:
                kind = OTHER_REASONS
            rejected[kind] = rejected.get(kind, 0) + 1


def add_weights(totals: RoundTotals, staleness: list[int], weights: list[float]) -> None:
    """Add the weights of one round, which are divided by their sum; a round whose weights are all 0 is left out."""
    total = sum(weights)
    if not 0 < total < inf:
        return
    for weight, late in zip(weights, staleness, strict=True):
        bin_ = late.bit_length()
        while len(totals.bin_counts) <= bin_:
            totals.bin_counts.append(0)
            totals.bin_weights.append(0.0)
        totals.bin_counts[bin_] += 1
        totals.bin_weights[bin_] += weight * len(weights) / total
