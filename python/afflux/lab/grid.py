"""A grid of settings or random trials, `tune` and `afflux compare --grid`.

Each rule's best setting on a validation part is run with all seeds on the test part.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args
from zlib import crc32

from afflux.lab.outcomes import Outcome
from afflux.lab.publishing import (
    Measure,
    Page,
    final_score,
    markdown_table,
    or_none,
    publish,
)
from afflux.lab.results.finished_runs import Job, key_of
from afflux.lab.results.run_result import Evaluated, Evaluation, SeedStatistics
from afflux.lab.runs.library import Simulation
from afflux.lab.runs.workers import Workers
from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief
from afflux.rules.specs import BUFFER_SIZE, RuleSpec, format_option, option_value, rule_parameters
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric
from afflux.sim.workload.random_streams import StreamPurpose, random_stream

#: Settings that a grid may have in addition to the options of rules.
SETTINGS = ("client_lr", "local_steps", "local_epochs", "batch_size", "weight_decay", "mu", "concurrency", "refill")
#: The run folder of the test part.
TEST = "test"
EDGE = "†"  #: marks a best value in tables


#: Values, as text, by name.
Axes = Mapping[str, tuple[str, ...]]


def parse_grid(texts: Sequence[str]) -> Axes:
    """Read NAME=VALUE,VALUE,... : a setting, an option of the rules that have it, or RULE.NAME of one rule.

    A range is one value, LOW..HIGH.

    Raises:
        ConfigError: no values, or a name or value given twice.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, right = text.partition("=")
        values = tuple(value.strip() for value in re.split(r",(?![^(]*\))", right))  # not in hinge(10,4)
        if not equals or not all(values) or len(set(values)) != len(values):
            raise ConfigError(f"grid {text!r} is not NAME=VALUE,VALUE,... with different values")
        rule, dot, option = name.strip().rpartition(".")  # a file of the rule may have a "-" in its name
        name = rule + dot + option.replace("-", "_")
        if name in axes:
            raise ConfigError("a name of the grid is given twice")
        axes[name] = values
    return axes


class Point(NamedTuple):
    """One setting of one rule."""

    rule: str  #: label of the rule, without the grid
    spec: RuleSpec
    config: SimConfig
    chosen: Mapping[str, str]  #: the values of the grid


def points(specs: Sequence[RuleSpec], axes: Axes, config: SimConfig, trials: int = 0, seed: int = 0) -> list[Point]:
    """Return all settings of all rules; a rule without an option of the grid has fewer.

    Args:
        specs: the rules.
        axes: the grid.
        config: the settings that are not in the grid.
        trials: if not 0, the number of settings of a rule, which are drawn (see `_draw`); equal ones count once.
        seed: of the draws. All rules have the same draws of an option.

    Raises:
        ConfigError: a name that no rule and no setting has, or an impossible value.
    """
    if trials < 0:
        raise ConfigError(f"trials is {trials}, must be 0 or more")
    grid, used = [], set[str]()
    for spec in specs:
        targets = _targets(specs, spec, axes)
        used |= targets.keys()
        rows: Iterable[tuple[str, ...]] = product(*(axes[name] for name in targets))
        if trials:
            kinds = {name: _annotation(spec, name, option) for name, option in targets.items()}
            rows = [tuple(_draw(name, axes[name], kinds[name], seed, k) for name in targets) for k in range(trials)]
        for values in dict.fromkeys(rows):
            grid.append(_point(spec, config, targets, dict(zip(targets, values, strict=True))))
    if unused := [name for name in axes if name not in used]:
        raise ConfigError(f"grid {unused[0]}: {_why_unused(specs, unused[0])}")
    return grid


def _annotation(spec: RuleSpec, name: str, option: str) -> Any:
    if option:
        return rule_parameters(spec.name)[option].annotation
    return SimConfig.__dataclass_fields__[name.rpartition(".")[2]].type


def _draw(name: str, values: tuple[str, ...], annotation: Any, seed: int, trial: int) -> str:
    """Draw one of the values, or a number of a range.

    A float of a range with LOW > 0 is drawn log-uniformly, and any other number uniformly; both are rounded to three
    digits. The stream depends on the option's name, the seed and the number of the trial alone.

    Raises:
        ConfigError: an impossible range, or one beside other values.
    """
    option = name.rpartition(".")[2]
    share = float(random_stream(seed, StreamPurpose.TRIALS, trial, crc32(option.encode())).random())
    if not any(".." in value for value in values):
        return values[int(share * len(values))]
    whole = int in (annotation, *get_args(annotation)) and float not in (annotation, *get_args(annotation))
    try:
        (text,) = values
        low, high = map(int if whole else float, text.split(".."))
    except ValueError:
        low, high = 0, 0
    if not -inf < low < high < inf:
        raise ConfigError(f"grid {name}: {','.join(values)} is no range LOW..HIGH of {'whole ' * whole}numbers")
    if whole:
        return str(low + int(share * (high - low + 1)))
    value = low * (high / low) ** share if low > 0 else low + (high - low) * share
    return str(min(max(float(f"{value:.3g}"), low), high))


def _why_unused(specs: Sequence[RuleSpec], name: str) -> str:
    rule, dot, option = name.rpartition(".")
    if not dot and any(name in rule_parameters(spec.name) for spec in specs):
        return f"RULE.{name} replaces it for every rule that has it"
    if not dot:
        return f"no rule has this option, nor is it one of the settings {', '.join(SETTINGS)}"
    named = _named(specs, rule)
    if not named:
        return f"there is no rule {rule}; the rules are {', '.join(spec.name for spec in specs)}"
    return f"{rule} has no option {option}; its options are {', '.join(rule_parameters(named[0].name))}"


def _named(specs: Sequence[RuleSpec], rule: str) -> list[RuleSpec]:
    """Return the rules with this name or label; if there are none, those of a file with this function."""
    if named := [spec for spec in specs if rule in (spec.name, spec.label)]:
        return named
    named = [spec for spec in specs if spec.name.rpartition(":")[2] == rule]
    if len(names := sorted({spec.name for spec in named})) > 1:
        raise ConfigError(f"grid: {rule} is one of {', '.join(names)}; write the file too")
    return named


def _targets(specs: Sequence[RuleSpec], spec: RuleSpec, axes: Axes) -> dict[str, str]:
    """Return the option of this rule, or "" for a setting, by the name of the grid; RULE.NAME replaces NAME."""
    targets: dict[str, str] = {}
    for name in sorted(axes, key=lambda name: "." in name, reverse=True):
        rule, dot, option = name.rpartition(".")
        if (dot and spec not in _named(specs, rule)) or option in {other.rpartition(".")[2] for other in targets}:
            continue
        if option in SETTINGS:
            targets[name] = ""
        elif option in rule_parameters(spec.name):
            targets[name] = option
    return {name: targets[name] for name in axes if name in targets}


def _point(spec: RuleSpec, config: SimConfig, targets: Mapping[str, str], chosen: Mapping[str, str]) -> Point:
    settings: dict[str, Any] = {}
    options = dict(spec.options)
    for name, option in targets.items():
        if option in options and (option, options[option]) != ("buffer_size", BUFFER_SIZE):
            raise ConfigError(f"grid {name}: {spec.label} has {option}={format_option(options[option])} already")
        try:
            value = option_value(chosen[name], _annotation(spec, name, option))
            (options if option else settings)[option or name.rpartition(".")[2]] = value
        except (TypeError, ValueError) as error:
            more = "; a range LOW..HIGH needs trials" if ".." in chosen[name] else ""
            raise ConfigError(f"grid {name}: {error}{more}") from None
    added = {name: value for name, value in options.items() if (name, value) not in spec.options}
    label = spec.label + "".join(f":{name}={format_option(value)}" for name, value in sorted(added.items()))
    tuned = RuleSpec(spec.name, tuple(sorted(options.items())), label)
    tuned.build()
    return Point(spec.label, tuned, replace(config, **settings), chosen)


@dataclass(frozen=True)
class Trial(Evaluated):
    """One setting of a rule, and its run on the validation part."""

    rule: str  #: the rule's label, without the grid
    chosen: Mapping[str, str]  #: the values of the grid, as text
    label: str  #: the rule with the options of the grid
    score: float  #: mean over the last quarter of the run; nan: a client diverged
    evaluations: tuple[Evaluation, ...]  #: empty: a client diverged
    metrics: tuple[Metric, ...] = CLASSIFICATION
    reason: str = ""  #: why it has no evaluations


class BestTrial(NamedTuple):
    """The best setting of a rule, and its runs on the test part."""

    trial: Trial
    config: SimConfig  #: all settings of the runs
    runs: tuple[Outcome, ...]  #: one for each seed; a run in which a client diverged has no evaluations
    edges: tuple[str, ...] = ()  #: names of the grid of which the best setting has the least or the largest number

    @property
    def scores(self) -> list[float | None]:
        """Score after the last arrival, for each seed; None: a client diverged."""
        return [run.final_score if run.evaluations else None for run in self.runs]

    @property
    def test(self) -> SeedStatistics | None:
        """Score after the last arrival over seeds; None: a client diverged."""
        return final_score(self.runs) if None not in self.scores else None


@dataclass(frozen=True)
class TuningResults:
    """The results of a grid; its text is the page of the command line."""

    names: tuple[str, ...]  #: of the grid
    seeds: tuple[int, ...]  #: of the runs on the test part; the first is that of the grid
    trials: tuple[Trial, ...]
    best: tuple[BestTrial, ...]  #: one for each rule

    @property
    def metric(self) -> Metric:
        """The score of all runs, as the page shows it."""
        runs = [*self.trials, *(run for one in self.best for run in one.runs)]
        metrics = next((run.metrics for run in self.trials if run.evaluations), CLASSIFICATION)
        return metrics[0].shown(row.score for run in runs for row in run.evaluations)

    def __str__(self) -> str:
        return _markdown(self)


def tune(
    simulation: Simulation,
    grid: Mapping[str, Sequence[Any]],
    *,
    trials: int = 0,
    out: Path | str | None = None,
    processes: int = 1,
    workers: Workers = 1,
) -> TuningResults:
    """Find the best setting of each rule on a validation part, and run it with all seeds on the test part.

    Each rule is run with all combinations of the grid, or with `trials` of them, and the first seed. The best setting
    has the best mean score over the last quarter of the run; a setting with which clients diverge is never the
    best.

    Args:
        simulation: its rules, seeds, task and settings.
        grid: values by name: a setting such as client_lr, an option of the rules that have it such as server_lr, or
            RULE.NAME, which replaces NAME for this rule. The names of settings are those of `SimConfig`, also if the
            simulation trains by `sgd(...)`. With trials also a range, "LOW..HIGH".
        trials: if not 0, the number of settings of each rule, drawn at random by the first seed: a value of a sequence
            with equal chances, a float of a range with LOW > 0 log-uniformly, any other number of a range uniformly.
            All rules have the same draws. More trials continue fewer.
        out: a folder for grid.md, grid.json, the finished runs and the run folder of the test part, test/;
            default: nothing is written. If the folder holds finished runs of the same grid, these are not made again.
            Another model or other data are an error.
            A change of the simulation's functions, or of the data that a function `clients` returns, is not noticed:
            it needs a new folder.
        processes: see `Simulation.run`.
        workers: see `Simulation.run`.

    Returns:
        All trials with their evaluations, and the best one of each rule; as text, the page of the command line.

    Raises:
        ConfigError: an impossible grid, clients that diverge with every setting of a rule, a task without a validation
            part, a simulation with `paired=True`, or an `out` with other things.
    """
    if any(job.followers for job in simulation.jobs):
        raise ConfigError("a grid makes runs of its own: the simulation must not have paired=True")
    for name, values in grid.items():
        if isinstance(values, str) and ".." in values:
            continue
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ConfigError(f"grid {name}: {brief(values)} is no sequence of values, such as [{brief(values)}]")
    texts = {
        name: values if isinstance(values, str) else ",".join(map(format_option, values))
        for name, values in grid.items()
    }
    axes = parse_grid([f"{name}={text}" for name, text in texts.items()])
    specs = list({job.spec.label: job.spec for job in simulation.jobs}.values())
    seeds = list(dict.fromkeys(job.seed for job in simulation.jobs))
    options: dict[str, Any] = {"processes": processes, "workers": workers, "task": simulation.task}

    with TemporaryDirectory() as folder:
        page, _ = publish_grid(Path(out or folder), specs, axes, seeds, simulation.config, trials, **options)
    assert isinstance(page.results, TuningResults)
    return page.results


def publish_grid(
    out: Path | None,
    specs: Sequence[RuleSpec],
    axes: Axes,
    seeds: Sequence[int],
    config: SimConfig,
    trials: int,
    **options: Any,
) -> tuple[Page, Path]:
    """Write the page of a grid into a folder, and return both; see `publish` and `run_grid`."""
    grid = points(specs, axes, config, trials, seeds[0])
    keys = [key_of(Job(point.spec, seeds[0], config=point.config), code=False) for point in grid]

    def make(run: Measure) -> Page:
        return grid_page(run_grid(specs, axes, seeds, config, run, trials))

    return publish(out, make, [*keys, *(f"seed {seed}" for seed in seeds)], **options)


def run_grid(
    specs: Sequence[RuleSpec], axes: Axes, seeds: Sequence[int], config: SimConfig, measure: Measure, trials: int = 0
) -> TuningResults:
    """Run the grid with the first seed on the validation part, then each rule's best setting with all seeds.

    Args:
        specs: the rules.
        axes: the grid.
        seeds: of the runs on the test part.
        config: the settings that are not in the grid.
        measure: runs jobs, and continues after an earlier interruption; a run that diverges has no evaluations.
        trials: see `tune`.

    Raises:
        ConfigError: an impossible grid; no setting of a rule ends; or the task has no validation part.
    """
    if config.part != "test":
        raise ConfigError(f"part is {config.part}, but a grid runs each rule's best setting on the test part")
    grid = points(specs, axes, config, trials, seeds[0])
    parts = [replace(point.config, part="validation") for point in grid]
    tuning = measure([Job(point.spec, seeds[0], (), part, True) for point, part in zip(grid, parts, strict=True)])
    tried = []
    for point, outcome in zip(grid, tuning, strict=True):
        score = outcome.late_score() if outcome.evaluations else nan
        label, metrics = point.spec.label, outcome.metrics
        tried.append(Trial(point.rule, point.chosen, label, score, outcome.evaluations, metrics, outcome.reason))
    best = [_best(spec.label, tried) for spec in specs]
    jobs = [Job(grid[at].spec, seed, (), grid[at].config, True) for at in best for seed in seeds]
    tests = measure(jobs, run_folder=TEST)
    runs = [tuple(tests[place * len(seeds) :][: len(seeds)]) for place in range(len(best))]
    winners = tuple(
        BestTrial(tried[at], grid[at].config, own, _edges(tried[at], tried)) for at, own in zip(best, runs, strict=True)
    )
    return TuningResults(tuple(axes), tuple(seeds), tuple(tried), winners)


def _best(rule: str, trials: Sequence[Trial]) -> int:
    """Return the index of the rule's trial with the best score; of equal ones, the first."""
    own = [at for at, trial in enumerate(trials) if trial.rule == rule]
    ended = [at for at in own if not isnan(trials[at].score)]
    if not ended:
        diverged = not any(trials[at].evaluations for at in own)
        reasons = [trials[at].reason for at in own if trials[at].reason]
        what = f"no run of the grid has a result{f', the first because {reasons[0]}' if reasons else ''}"
        metric = trials[own[0]].metrics[0].words
        raise ConfigError(f"{rule}: {what if diverged else f'{metric} is nan with every setting of the grid'}")
    scores = {at: trials[at].score for at in ended}
    return next(at for at in ended if scores[at] == trials[at].metrics[0].best(scores.values()))


def _edges(best: Trial, trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the names of which the setting has the least or the largest of several numbers."""
    edges = []
    for name in best.chosen:
        numbers = {
            number for trial in trials if trial.rule == best.rule if (number := _asfinite(trial, name)) is not None
        }
        if len(numbers) > 1 and _asfinite(best, name) in (min(numbers), max(numbers)):
            edges.append(name)
    return tuple(edges)


def _asfinite(trial: Trial, name: str) -> float | None:
    try:
        return float(trial.chosen[name])
    except (KeyError, ValueError):
        return None


def grid_page(results: TuningResults) -> Page:
    """Return the page: the table of the grid, and that of the best settings."""
    metric = results.metric
    content = {
        "part": "validation",
        "tuning_seed": results.seeds[0],
        "seeds": list(results.seeds),
        "grid": [{"rule": trial.rule, **trial.chosen, metric.name: or_none(trial.score)} for trial in results.trials],
        "best": [
            {
                "rule": one.trial.rule,
                **one.trial.chosen,
                "label": one.trial.label,
                "validation": one.trial.score,
                "test": None if one.test is None or isnan(one.test.mean) else one.test._asdict(),
                "accuracies" if metric.name == "accuracy" else metric.name: [
                    None if score is None else or_none(score) for score in one.scores
                ],
            }
            for one in results.best
        ],
    }
    return Page("grid", str(results), content, results=results)


def _markdown(results: TuningResults) -> str:
    names, metric = results.names, results.metric
    columns = ["validation, %", "test, %"] if metric.is_share else ["validation", "test"]
    best = markdown_table(["rule", *names, *columns], [_best_line(names, one, metric) for one in results.best])
    grid = markdown_table(["rule", *names, columns[0]], [_line(names, trial, metric) for trial in results.trials])
    return (
        f"Best setting of each rule on the validation part (seed {results.seeds[0]}, mean over the last quarter of a "
        f"run), and its last {metric.words if metric.is_share else metric.title()} on the test part over the seeds "
        f"{', '.join(map(str, results.seeds))}.\n\n{best}\n"
        + (f"{EDGE} The best value is at the edge of the grid: try values beyond it.\n\n" if EDGE in best else "")
        + f"The grid:\n\n{grid}"
    )


def _line(names: Sequence[str], trial: Trial, metric: Metric) -> list[str]:
    shown = "diverged" if isnan(trial.score) else _text(SeedStatistics(trial.score, nan, 1), metric)
    return [f"`{trial.rule}`", *(trial.chosen.get(name, "") for name in names), shown]


def _best_line(names: Sequence[str], one: BestTrial, metric: Metric) -> list[str]:
    rule, *cells = _line(names, one.trial, metric)
    marked = [f"{cell} {EDGE}" if name in one.edges else cell for name, cell in zip(names, cells, strict=False)]
    return [rule, *marked, cells[-1], "diverged" if one.test is None else _text(one.test, metric)]


def _text(score: SeedStatistics, metric: Metric) -> str:
    return score.text(None, 1, 100) if metric.is_share else score.text(None)
