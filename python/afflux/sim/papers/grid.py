"""A grid of settings: each rule's best on a validation part, then that setting with all seeds on the test part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import nan
from typing import Any, NamedTuple

from afflux.sim.errors import ConfigError
from afflux.sim.papers.finished_runs import Outcome
from afflux.sim.papers.publishing import Measure, Page, final_accuracy, markdown_table
from afflux.sim.results.run_result import SeedStatistics
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec, format_option, option_value, rule_parameters

#: Settings that a grid may have in addition to the options of rules.
SETTINGS = ("client_lr", "local_steps", "local_epochs", "batch_size", "weight_decay", "mu", "concurrency", "refill")
#: Evaluations whose mean accuracy is compared: those in the last part of a run, which are less noisy than the last.
LATE_SHARE = 0.25


class Axis(NamedTuple):
    """One name of a grid and its values, as text."""

    name: str
    values: tuple[str, ...]


def parse_grid(texts: Sequence[str]) -> list[Axis]:
    """Read NAME=VALUE,VALUE,... : a setting, an option of the rules that have it, or RULE.OPTION of one rule.

    Raises:
        ConfigError: no values, or a name or value given twice.
    """
    axes = []
    for text in texts:
        name, equals, values = text.partition("=")
        found = tuple(value.strip() for value in values.split(","))
        if not equals or not all(found) or len(set(found)) != len(found):
            raise ConfigError(f"grid {text!r} is not NAME=VALUE,VALUE,... with different values")
        axes.append(Axis(name.strip().replace("-", "_"), found))
    if len({axis.name for axis in axes}) != len(axes):
        raise ConfigError("a name of the grid is given twice")
    return axes


class Point(NamedTuple):
    """One setting of one rule."""

    rule: int  #: index of the rule
    spec: RuleSpec
    config: SimConfig
    chosen: Mapping[str, str]  #: the values of the grid


def points(specs: Sequence[RuleSpec], axes: Sequence[Axis], config: SimConfig) -> list[Point]:
    """Return all settings of all rules; a rule without an option of the grid has fewer.

    Raises:
        ConfigError: a name that no rule and no setting has, or an impossible value.
    """
    found, used = [], set[str]()
    for index, spec in enumerate(specs):
        own = [(axis, target) for axis in axes if (target := _target(spec, axis)) is not None]
        used |= {axis.name for axis, _ in own}
        for values in product(*(axis.values for axis, _ in own)):
            chosen = {axis.name: value for (axis, _), value in zip(own, values, strict=True)}
            found.append(_point(index, spec, config, own, chosen))
    if unused := [axis.name for axis in axes if axis.name not in used]:
        known = ", ".join(SETTINGS)
        raise ConfigError(f"grid {unused[0]}: no rule has this option, nor is it one of the settings {known}")
    return found


def _target(spec: RuleSpec, axis: Axis) -> str | None:
    """Return the option of the rule, "" for a setting, or None if the axis is of other rules."""
    if axis.name in SETTINGS:
        return ""
    rule, dot, option = axis.name.rpartition(".")
    if dot and rule not in (spec.name, spec.label):
        return None
    return option if option in rule_parameters(spec.name) else None


def _point(
    index: int, spec: RuleSpec, config: SimConfig, own: Sequence[tuple[Axis, str]], chosen: Mapping[str, str]
) -> Point:
    types = {field.name: field.type for field in fields(SimConfig)}
    settings: dict[str, Any] = {}
    options = dict(spec.options)
    for axis, option in own:
        value = chosen[axis.name]
        try:
            if option:
                options[option] = option_value(value, rule_parameters(spec.name)[option].annotation)
            else:
                settings[axis.name] = option_value(value, types[axis.name])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"grid {axis.name}: {error}") from None
    added = {name: value for name, value in options.items() if (name, value) not in spec.options}
    label = spec.label + "".join(f":{name}={format_option(value)}" for name, value in sorted(added.items()))
    made = RuleSpec(spec.name, tuple(sorted(options.items())), label)
    made.build()
    return Point(index, made, replace(config, **settings), chosen)


def tune(
    specs: Sequence[RuleSpec], axes: Sequence[Axis], seeds: Sequence[int], config: SimConfig, measure: Measure
) -> Page:
    """Run the grid with the first seed on the validation part, then each rule's best setting with all seeds.

    Args:
        specs: the rules.
        axes: the grid.
        seeds: of the runs on the test part.
        config: the settings that are not in the grid.
        measure: runs jobs, and continues after an earlier interruption; a run that diverges has no evaluations.

    Returns:
        The page, with the table of the grid and that of the best settings.

    Raises:
        ConfigError: an impossible grid; no setting of a rule ends; or the task has no validation part.
    """
    grid = points(specs, axes, config)
    tried = [replace(point.config, part="validation") for point in grid]
    tuning = measure([Job(p.spec, seeds[0], (), own, True) for p, own in zip(grid, tried, strict=True)])
    scores = [_score(outcome) for outcome in tuning]
    best = [_best(index, spec, grid, scores) for index, spec in enumerate(specs)]
    jobs = [Job(grid[at].spec, seed, (), grid[at].config, True) for at in best for seed in seeds]
    final = measure(jobs)
    results = [final[place : place + len(seeds)] for place in range(0, len(final), len(seeds))]
    content = {
        "part": "validation",
        "tuning_seed": seeds[0],
        "seeds": list(seeds),
        "grid": [
            {"rule": specs[point.rule].label, **point.chosen, "accuracy": None if score != score else score}
            for point, score in zip(grid, scores, strict=True)
        ],
        "best": [
            {
                "rule": spec.label,
                **grid[at].chosen,
                "label": grid[at].spec.label,
                "validation": scores[at],
                "test": _statistics(runs),
                "accuracies": [run.evaluations[-1].accuracy if run.evaluations else None for run in runs],
            }
            for spec, at, runs in zip(specs, best, results, strict=True)
        ],
    }
    return Page("grid", _markdown(specs, axes, grid, scores, best, results, seeds), content)


def command(specs: Sequence[RuleSpec], axes: Sequence[Axis], seeds: Sequence[int], config: SimConfig) -> dict[str, Any]:
    """Return what the page of a grid depends on, but for the folder of the data; for `publish`."""
    settings = config.recorded()
    settings.pop("data_dir", None)
    return {
        "command": "grid",
        "rules": [{"label": spec.label, "options": spec.plain_options()} for spec in specs],
        "grid": {axis.name: list(axis.values) for axis in axes},
        "seeds": list(seeds),
        "settings": settings,
    }


def _score(outcome: Outcome) -> float:
    return outcome.late_accuracy(LATE_SHARE) if outcome.evaluations else nan


def _best(index: int, spec: RuleSpec, grid: Sequence[Point], scores: Sequence[float]) -> int:
    """Return the place of the rule's setting with the largest score; of equal ones, the first."""
    ended = [at for at, point in enumerate(grid) if point.rule == index and scores[at] == scores[at]]
    if not ended:
        raise ConfigError(f"{spec.label}: the clients diverged with every setting of the grid")
    return max(ended, key=lambda at: (scores[at], -at))


def _statistics(runs: Sequence[Outcome]) -> dict[str, Any] | None:
    return final_accuracy(runs)._asdict() if all(run.evaluations for run in runs) else None


def _markdown(
    specs: Sequence[RuleSpec],
    axes: Sequence[Axis],
    grid: Sequence[Point],
    scores: Sequence[float],
    best: Sequence[int],
    results: Sequence[Sequence[Outcome]],
    seeds: Sequence[int],
) -> str:
    names = [axis.name for axis in axes]
    lines = [
        _best_line(spec, names, grid[at], scores[at], runs) for spec, at, runs in zip(specs, best, results, strict=True)
    ]
    table = markdown_table(["rule", *names, "validation, %", "test, %"], lines)
    all_lines = [
        [f"`{specs[point.rule].label}`", *_values(names, point), "diverged" if score != score else f"{100 * score:.1f}"]
        for point, score in zip(grid, scores, strict=True)
    ]
    tuned = markdown_table(["rule", *names, "validation, %"], all_lines)
    return (
        f"Best setting of each rule on the validation part (seed {seeds[0]}, mean over the last quarter of a run), and "
        f"its last accuracy on the test part over the seeds {', '.join(map(str, seeds))}.\n\n{table}\n"
        f"The grid:\n\n{tuned}"
    )


def _best_line(spec: RuleSpec, names: Sequence[str], point: Point, score: float, runs: Sequence[Outcome]) -> list[str]:
    shown = "diverged"
    if all(run.evaluations for run in runs):
        found: SeedStatistics = final_accuracy(runs)
        shown = f"{100 * found.mean:.1f}" + (f" ± {100 * found.std:.1f}" if found.seeds > 1 else "")
    return [f"`{spec.label}`", *_values(names, point), f"{100 * score:.1f}", shown]


def _values(names: Sequence[str], point: Point) -> Iterator[str]:
    return (point.chosen.get(name, "") for name in names)
