"""The result of one run, and statistics over seeds."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from afflux.arrays.layout import Layout
from afflux.lab.results.model_file import constants_sha256, load_model
from afflux.ops.errors import ConfigError
from afflux.rules.specs import RuleSpec
from afflux.sim.workload.config import Count
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric

if TYPE_CHECKING:
    from torch import nn

#: The fields of an evaluation before the values of its metrics.
PLACE = ("arrivals", "version", "virtual_time")


class Evaluation(tuple[Any, ...]):
    """One evaluation of the server's model on the test part: arrivals, version, virtual time, and a value a metric.

    The values are attributes by the names of the task's metrics: `accuracy` and `loss`, unless it declares others.
    """

    accuracy: float
    loss: float
    arrivals: int = property(itemgetter(0))  # type: ignore[assignment]
    version: int = property(itemgetter(1))  # type: ignore[assignment]
    virtual_time: float = property(itemgetter(2))  # type: ignore[assignment]
    #: The value of the first metric.
    score: float = property(itemgetter(3))  # type: ignore[assignment]
    names: tuple[str, ...] = tuple(metric.name for metric in CLASSIFICATION)  #: Of the metrics.

    def __new__(
        cls, arrivals: int, version: int, virtual_time: float, *values: float, names: tuple[str, ...] = ()
    ) -> "Evaluation":
        """Hold the values of the metrics with these names; default accuracy and loss."""
        evaluation = super().__new__(cls, (arrivals, version, virtual_time, *values))
        if names:
            evaluation.names = names
        if len(values) != len(evaluation.names):
            raise ValueError(f"an evaluation has {len(values)} values of {', '.join(evaluation.names)}")
        return evaluation

    def __reduce__(self) -> Any:
        """Return what a copy is made from."""
        return partial(Evaluation, names=self.names), tuple(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> float:
            if name not in self.names:
                raise AttributeError(f"an evaluation has {', '.join((*PLACE, *self.names))}, not {name}")
            return self[len(PLACE) + self.names.index(name)]


def evaluation_reader(metrics: Sequence[Metric]) -> Callable[[type, Any], Evaluation]:
    """Return the `dec_hook` of msgspec that reads evaluations of these metrics."""
    names = tuple(metric.name for metric in metrics)

    def read(kind: type, row: Any) -> Evaluation:
        arrivals, version, *numbers = msgspec.convert(row, list[float])
        return Evaluation(int(arrivals), int(version), *numbers, names=names)

    return read


class ClientEvaluation(NamedTuple):
    """The values of the task's metrics on the data of one client."""

    arrivals: int
    client: int
    model: str  #: "server", or "personal" for the model that the task has adapted to the client
    values: tuple[float, ...]


class Evaluated:
    """A run with evaluations; there may be none, if a client diverged.

    `final_accuracy`, `best_accuracy` and `late_accuracy` are the scores; of a metric with another name, this name
    replaces accuracy.
    """

    evaluations: tuple[Evaluation, ...]  #: in the order of the arrivals
    metrics: tuple[Metric, ...]  #: of the evaluations; tables compare the first one, the score
    final_accuracy: float
    best_accuracy: float

    @property
    def final_score(self) -> float:
        """The score after the last arrival."""
        return self.evaluations[-1].score

    @property
    def best_score(self) -> float:
        """The best score of all evaluations."""
        return self.metrics[0].best(evaluation.score for evaluation in self.evaluations)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kind, _, metric = name.partition("_")
            if kind not in ("final", "best", "late") or metric != self.metrics[0].name:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return getattr(self, f"{kind}_score")


class RoundTotals(Struct):
    """Sums over the rounds of a run; weights are those of the report, divided by their sum over the round.

    Other sums, of an older afflux, are not read.
    """

    skipped: Count = 0  #: rounds without a step: the rule rejected all arrivals
    rejected: dict[str, Count] = msgspec.field(default_factory=dict)  #: arrivals by reason, numbers replaced by #
    #: Arrivals by staleness: 0, 1, 2-3, 4-7, ...: bin b holds a staleness of b bits.
    bin_counts: list[Count] = msgspec.field(default_factory=list)
    #: Sum of M p_i over the arrivals of a bin: a mean of 1 is an equal share.
    bin_weights: list[float] = msgspec.field(default_factory=list)


def arrivals_per_client(clients: np.ndarray, num_clients: int) -> np.ndarray:
    """Return how often each client arrived, in ascending order, int64.

    Args:
        clients: of each arrival, integers.
        num_clients: clients that hold data; those never seen count as 0.
    """
    _, counts = np.unique(clients, return_counts=True)
    return np.sort(np.concatenate([np.zeros(max(num_clients - len(counts), 0), np.int64), counts]))


def gini(counts: np.ndarray) -> float:
    """Return the Gini coefficient of counts c_1 <= ... <= c_n, G = sum_i (2 i - n - 1) c_i / (n sum_i c_i).

    0: all clients arrived equally often; near 1: one client sent nearly all updates; nan: none arrived.
    """
    n, total = len(counts), int(counts.sum())
    return int((2 * np.arange(1, n + 1) - n - 1) @ counts) / (n * total) if total else math.nan


def params_sha256(params: np.ndarray, dtype: str = "<f4") -> str:
    """Return the SHA-256, in hexadecimal, of params (d,) as little-endian float32, or of buffers as "<f8"."""
    return hashlib.sha256(params.astype(dtype).tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class RunResult(Evaluated):
    """The result of one rule with one seed."""

    spec: RuleSpec
    seed: int
    evaluations: tuple[Evaluation, ...]
    staleness: np.ndarray  #: of each arrival, in the order of arrival; int64
    round_staleness: np.ndarray  #: largest staleness of each round; int64
    #: Seconds of each round, as the server reports them; the only field that is not reproducible.
    server_seconds: np.ndarray
    state_bytes: int
    num_clients: int  #: clients that hold data
    params: np.ndarray  #: empty in a result that was read
    leader: str = ""  #: label of the rule from whose params the clients trained, if it is not this run's own
    #: Of each arrival, in the order of arrival; int64.
    clients: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    #: Number of arrivals by the server's decision: joined, replaced, superseded, rejected, dropped; or faulty:
    #: the training has failed. In results of afflux 0.1.0 also deferred.
    decisions: dict[str, int] = field(default_factory=dict)
    #: Sums over rounds: weights by staleness, rejections by reason.
    totals: RoundTotals = field(default_factory=RoundTotals)
    settings: Mapping[str, Any] = field(default_factory=dict)  #: the settings that the run has read
    #: How the data are divided: the number of clients and, if the simulator divides them, the partition.
    division: Mapping[str, Any] = field(default_factory=dict)
    #: All options of the rule as JSON scalars, defaults included.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The rule's parts with all their values: `Rule.to_config()`.
    parts: Mapping[str, Any] = field(default_factory=dict)
    first_params_sha256: str = ""  #: see `params_sha256`
    digest: str = ""  #: SHA-256 of the final params' bytes: results with equal digests are bit-identical
    #: CPU seconds of the run in its own process, with those before a checkpoint from which it went on; not reproducible
    #: either.
    seconds: float = math.nan
    metrics: tuple[Metric, ...] = CLASSIFICATION
    client_evaluations: tuple[ClientEvaluation, ...] = ()  #: of a sample of clients, if the task evaluates clients
    buffers: np.ndarray | None = None  #: those of the final model, float64; None: it has none, or the result was read
    buffers_digest: str = ""  #: SHA-256 of the final buffers; empty: the model has none
    layout: Layout | None = None  #: the places of the model's arrays in params and buffers; None: the result was read
    constants: str = ""  #: SHA-256 of the arrays that no client trains
    inputs: Mapping[str, str] = field(default_factory=dict)  #: digests of data, initial model, ...; empty: no log
    model_file: Path | None = None  #: in the run folder, with every array of the final model; None: no folder
    num_params: int = 0  #: d

    def load(self, model: "nn.Module") -> None:
        """Copy all arrays of the final model into a torch module like that of the run.

        They are those of `model_file`, if there is one. Without it, arrays that no client trains must be those of the
        run already.

        Raises:
            ConfigError: there is no model, or another one; nothing is changed.
        """
        if self.model_file is not None:
            return load_model(self.model_file, model)
        if self.layout is None:
            raise ConfigError("the result was read from a folder without models/")
        try:
            if constants_sha256(model, self.layout.roles) != self.constants:
                raise ValueError("arrays that no client trains differ; make it as the run did, or run with out=")
            self.layout.load(model, self.params, self.buffers)
        except ValueError as error:
            raise ConfigError(f"the model differs from the one of this run: {error}") from error

    @property
    def buffer_size(self) -> int | None:
        """M, the arrivals of a server step; None in a result without the parts of its rule."""
        return self.parts.get("buffer_size")

    @property
    def max_staleness(self) -> int:
        """Largest staleness of all arrivals."""
        return int(self.staleness.max(initial=0))

    @property
    def mean_staleness(self) -> float:
        """Mean over arrivals (CA2FL's average)."""
        return float(self.staleness.mean()) if len(self.staleness) else math.nan

    @property
    def mean_max_staleness(self) -> float:
        """Mean over rounds of the round's largest staleness (FADAS's average)."""
        return float(self.round_staleness.mean()) if len(self.round_staleness) else math.nan

    @property
    def late_evaluations(self) -> tuple[Evaluation, ...]:
        """The last tenth of the evaluations after the start, rounded up; at least two, if there are two."""
        after = self.evaluations[1:]
        return after[-max(2, math.ceil(len(after) / 10)) :]

    @property
    @np.errstate(invalid="ignore")  # of infinite scores
    def late_score(self) -> float:
        """Mean score of the last tenth of the evaluations; nan if there are none after the start."""
        late = self.late_evaluations
        return float(np.mean([evaluation.score for evaluation in late])) if late else math.nan

    @property
    @np.errstate(invalid="ignore")
    def stability(self) -> float:
        """Standard deviation (n - 1) of the score over the last tenth of the evaluations: small is stable.

        WKAFL takes the last ten evaluations, FADAS those of the last five rounds. nan for fewer than two.
        """
        late = [evaluation.score for evaluation in self.late_evaluations]
        return float(np.std(late, ddof=1)) if len(late) > 1 else math.nan

    @property
    def rejected_arrivals(self) -> int:
        """Number of arrivals that the rule gave no weight, for any reason."""
        return sum(self.totals.rejected.values())

    @property
    def server_ms(self) -> float:
        """Mean milliseconds of the server's arithmetic per round."""
        return 1e3 * float(self.server_seconds.mean()) if len(self.server_seconds) else math.nan

    def first_to_reach(self, target: float) -> Evaluation | None:
        """Return the first evaluation with a score that reaches `target`, or None."""
        reaches = self.metrics[0].reaches
        return next((evaluation for evaluation in self.evaluations if reaches(evaluation.score, target)), None)

    def client_scores(self, model: str = "server") -> np.ndarray:
        """Return the scores of the sampled clients after the last arrival, the worst first; empty if there are none."""
        rows = self.client_evaluations
        last = [row.values[0] for row in rows if (row.arrivals, row.model) == (rows[-1].arrivals, model)]
        return np.array(sorted(last, reverse=self.metrics[0].lower_is_better))

    @np.errstate(invalid="ignore")
    def summary(self, target: float) -> dict[str, float]:
        """Return the summary's numbers by name; nan where the target was not reached."""
        hit, counts = self.first_to_reach(target), arrivals_per_client(self.clients, self.num_clients)
        others = {
            "rounds_to_target": hit.version if hit else math.nan,
            "time_to_target": hit.virtual_time if hit else math.nan,
            "participating_clients": int(np.count_nonzero(counts)),
            "participation_gini": gini(counts),
        }
        names = (*(number.name for number in NUMBERS), "server_ms", "state_bytes")
        values = {name: others[name] if name in others else getattr(self, name) for name in names}
        for model, prefix in MODELS.items():
            if n := len(scores := self.client_scores(model)):
                figures = scores.mean(), scores[: math.ceil(n / 10)].mean(), scores.std(ddof=1) if n > 1 else math.nan
                values |= {f"{prefix}_{kind}": float(x) for kind, x in zip(CLIENT_KINDS, figures, strict=True)}
        return {name.replace("score", self.metrics[0].name): value for name, value in values.items()}


class Number(NamedTuple):
    """A number of `RunResult.summary`, and how a table shows it."""

    name: str  #: in which the name of the first metric replaces "score"
    title: str
    digits: int | None  #: after the point; None: significant ones
    of_score: bool = False  #: whether it is in the unit of the score
    brief: bool = True  #: whether the terminal shows it
    #: Of a time to the target: what is larger at the end of a run without the target: a field of `Evaluation`.
    horizon: str = ""
    scale: float = 1.0  #: factor of the shown number


#: The numbers of `RunResult.summary` that tables show as mean and deviation; "{}" stands for the metric or the target.
NUMBERS = (
    Number("final_score", "final {}", 1, True),
    Number("best_score", "best {}", 1, True),
    Number("late_score", "mean {} of the last tenth", 1, True, False),
    Number("stability", "stability (deviation in the last tenth)", 2, True),
    Number("rounds_to_target", "rounds to {}", 0, horizon="version"),
    Number("time_to_target", "virtual time to {}", 0, horizon="virtual_time"),
    Number("max_staleness", "max staleness, rounds", 0),
    Number("mean_staleness", "mean staleness", 1),
    Number("mean_max_staleness", "mean max staleness", 1),
    Number("rejected_arrivals", "rejected arrivals", 0, brief=False),
    Number("participating_clients", "clients that took part", 0, brief=False),
    Number("participation_gini", "Gini coefficient of participation", 2, brief=False),
)
#: Beginnings of the names of further numbers, by `ClientEvaluation.model`, and ends of their names with their titles.
MODELS = {"server": "client", "personal": "personal_client"}
CLIENT_KINDS = {"score": "mean", "worst": "worst tenth", "deviation": "deviation"}
CLIENT_NUMBERS = tuple(
    Number(f"{prefix}_{kind}", f"{{}} of clients, {model} model: {title}", 2, True)
    for model, prefix in MODELS.items()
    for kind, title in CLIENT_KINDS.items()
)


class SeedStatistics(NamedTuple):
    """Mean and standard deviation over seeds (n - 1 in the denominator) of the finite values."""

    mean: float
    std: float
    seeds: int

    def text(self, runs: int | None, digits: int | None = None, scale: float = 1.0) -> str:
        """Return mean ± standard deviation; "-" if no run has the number.

        Args:
            runs: all seeds; None: not known.
            digits: after the point; None: four significant digits of the mean, two of the deviation.
            scale: factor of the shown number.
        """

        def shown(number: float, significant: int) -> str:
            places = digits
            if places is None and abs(number) < 10**significant - 0.5:
                return f"{number:.{significant}g}"
            return f"{number:.{places or 0}f}"  # no 1e+02 for 99.7

        if not self.seeds:
            return "-"
        text = shown(scale * self.mean, 4) + (f" ± {shown(scale * self.std, 2)}" if self.seeds > 1 else "")
        # Seeds that did not reach the target are left out of the mean: show how many did.
        return text if runs in (None, self.seeds) else f"{text} ({self.seeds} of {runs})"


class TimeStatistics(NamedTuple):
    """Median over seeds of a time to a target; runs that never reach the target count as slower than all that do."""

    median: float  #: a lower bound, if the median depends on runs that did not reach the target
    is_bound: bool
    seeds: int  #: number of runs that reached the target

    def text(self, runs: int | None, digits: int | None = None, scale: float = 1.0) -> str:
        """Return the median, after ">" if it is a bound, and how many runs reached it; see `SeedStatistics.text`."""
        number = SeedStatistics(self.median, math.nan, 1).text(None, digits, scale)
        text = f"> {number}" if self.is_bound else number
        return text if runs in (None, self.seeds) else f"{text} ({self.seeds} of {runs})"


def time_statistics(values: Sequence[float], horizons: Sequence[float]) -> TimeStatistics:
    """Return the median of times, of which nan means: later than the run's horizon."""
    reached = [not math.isnan(value) for value in values]
    low, high = (float(np.median(np.where(reached, values, late))) for late in (horizons, [math.inf] * len(horizons)))
    return TimeStatistics(low, low < high, sum(reached))


Statistics = SeedStatistics | TimeStatistics


def seed_statistics(values: Sequence[float]) -> SeedStatistics:
    """Return mean and standard deviation over seeds; values that are not finite are left out and not counted."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return SeedStatistics(math.nan, math.nan, 0)
    std = float(np.std(finite, ddof=1)) if len(finite) > 1 else 0.0
    return SeedStatistics(float(np.mean(finite)), std, len(finite))


def group_by_rule(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Group by the rule's label, in the order of first appearance."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.spec.label, []).append(result)
    return groups


def buffer_sizes(results: Sequence[RunResult]) -> dict[str, int]:
    """Return M of each rule, by label, if all runs know it; else nothing."""
    sizes = {run.spec.label: run.buffer_size for run in results}
    known_sizes = {label: size for label, size in sizes.items() if size is not None}
    return known_sizes if len(known_sizes) == len(sizes) else {}


def buffers_text(sizes: Mapping[str, int]) -> str:
    """Return M as a heading names it: the size of most rules, and the rules with another one.

    >>> buffers_text({"fedbuff": 10, "ca2fl": 10, "mine": 5})
    'M = 10 (mine: 5)'
    """
    usual = Counter(sizes.values()).most_common(1)[0][0]
    others = ", ".join(f"{label}: {size}" for label, size in sizes.items() if size != usual)
    return f"M = {usual}" + (f" ({others})" if others else "")


def summarise(results: Sequence[RunResult], target: float) -> dict[str, dict[str, Statistics]]:
    """Return {rule: {number: statistics over seeds}}: mean and deviation (nan for one seed), of times the median."""
    horizons = {number.name: number.horizon for number in NUMBERS if number.horizon}
    table: dict[str, dict[str, Statistics]] = {}
    for label, runs in group_by_rule(results).items():
        rows = [run.summary(target) for run in runs]
        table[label] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name in horizons:
                ends = [getattr(run.evaluations[-1], horizons[name]) for run in runs]
                table[label][name] = time_statistics(values, ends)
            else:
                mean = seed_statistics(values)
                table[label][name] = mean if mean.seeds > 1 else mean._replace(std=math.nan)
    return table
