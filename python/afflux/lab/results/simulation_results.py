"""The results of a simulation of several rules and seeds: statistics, data frames, figure, run folder."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from afflux.lab.results import run_folder
from afflux.lab.results.audit_log import FOLDER, file_stem, read_audit_log
from afflux.lab.results.finished_runs import FILE, FailedRun, Runs, all_lines, line_key, read_line, split_runs
from afflux.lab.results.run_result import RunResult, Statistics, summarise
from afflux.lab.results.statistics import LEVEL, PairedDifference, data_frame, paired_differences
from afflux.lab.tasks.ignored_settings import OF_DIVISION
from afflux.ops.errors import ConfigError
from afflux.ops.validation import known
from afflux.sim.errors import errors_of_writing, require
from afflux.sim.workload.config import OF_CLIENTS, SETTINGS, SimConfig

#: Inputs that no seed changes, unless the results show that one does.
_FIXED = ("data", "evaluation", "validation", "availability")
#: The inputs that a setting may change; other settings change none.
_INPUTS_OF = {"model": ["model"], "availability": ["availability"], **{name: ["clients"] for name in OF_DIVISION}}
_INPUTS_OF |= {name: ["data", "evaluation", "validation", "clients", "model"] for name in ("task", "data", "part")}


class SimulationResults(tuple[RunResult, ...]):
    """The results of all runs, seed by seed, in the order of the rules; printed as a table."""

    config: SimConfig  #: the settings of the runs
    failures: tuple[FailedRun, ...]  #: the runs without a result: one has diverged, ...
    varied: tuple[str, ...]  #: the settings in which runs of merged results differ, each a column of tables

    def __new__(
        cls,
        runs: Iterable[RunResult],
        config: SimConfig,
        failures: Iterable[FailedRun] = (),
        varied: Iterable[str] = (),
    ) -> "SimulationResults":
        """Hold results of runs with these settings."""
        results = super().__new__(cls, runs)
        results.config, results.failures, results.varied = config, tuple(failures), tuple(varied)
        return results

    @classmethod
    def of_runs(cls, finished: Mapping[int, Runs], config: SimConfig) -> "SimulationResults":
        """Return the results of runs by index; raise the error of the first run if none has a result."""
        runs, failures = split_runs(finished)
        if failures and not runs:
            raise failures[0].error
        return cls(runs, config, failures)

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return what a copy is made from."""
        return tuple(self), self.config, self.failures, self.varied

    def merge(self, *others: "SimulationResults", allow: Sequence[str] = ()) -> "SimulationResults":
        """Return these results and others, which differ from them in nothing but rules and seeds.

        Args:
            others: further results.
            allow: names of settings, such as "alpha", that may differ, too. Each that does is a column of the tables of
                `to_dataframe`, and its value is part of the rules' labels.

        Raises:
            ConfigError: the settings, the metrics, or inputs that these settings and seeds do not change, differ; or a
                run is in two of the results.
        """
        for name in allow:
            known("setting", name, SETTINGS)
        varied = {*self.varied}.union(*(_differing_settings(self, other, allow) for other in others))
        names = [name for name in SETTINGS if name in varied]
        parts = [_labelled(one, names) for one in (self, *others)]
        every, failures = list(chain.from_iterable(parts)), chain.from_iterable(one.failures for one in parts)
        for run, count in Counter((run.spec.label, run.seed) for run in every).items():
            if count > 1:
                raise ConfigError(f"there are {count} runs of {run[0]}, seed {run[1]}: relabel the rule of one first")
        return SimulationResults(sorted(every, key=lambda run: run.seed), self.config, failures, names)

    def relabel(self, labels: Mapping[str, str]) -> "SimulationResults":
        """Return the results with other labels of rules, by the present ones; the folder keeps its own.

        Raises:
            ConfigError: there is no rule with a label, or two rules would have the same one.
        """
        present = {run.spec.label for run in self}.union(*(failure.rule.split(" + ") for failure in self.failures))
        for label in labels:
            known("rule", label, present)
        if len({labels.get(label, label) for label in present}) < len(present):
            raise ConfigError(f"two rules would have the same label: {', '.join(labels.values())}")

        names = [" + ".join(labels.get(label, label) for label in one.rule.split(" + ")) for one in self.failures]
        failures = [one._replace(rule=name) for one, name in zip(self.failures, names, strict=True)]
        return SimulationResults((_renamed(run, labels) for run in self), self.config, failures, self.varied)

    def summary(self, target: float | None = None) -> dict[str, dict[str, Statistics]]:
        """Return {rule: {number: mean and deviation over seeds}}.

        Args:
            target: score for the rounds and the time to the target; default: that of the simulation.
        """
        return summarise(self, self.config.target if target is None else target)

    def paired_differences(self, number: str = "", level: float = LEVEL) -> list[PairedDifference]:
        """Return the differences between the rules over the seeds that they share, with Student's intervals.

        Args:
            number: a name of `RunResult.summary`; default the final score, such as final_accuracy.
            level: of the intervals.

        Raises:
            ConfigError: an unknown number, or a level outside (0, 1).
        """
        return paired_differences(self, number, level, self.config.target)

    def to_dataframe(self, table: str = "evaluations") -> Any:
        """Return results as a pandas DataFrame, whose first columns are rule and seed, except for the last two.

        Args:
            table: evaluations (one row each), runs (the numbers of `RunResult.summary`), arrivals (client and staleness
                of each), staleness and participation (arrivals by staleness, and by client), summary (mean and
                deviation of these numbers for each rule), table (the text that is printed), clients (the evaluations
                of single clients), or differences (of the final score between rules).

        Raises:
            ConfigError: an unknown table.
            MissingExtraError: pandas is not installed.
        """
        frame = data_frame(self, table, self.config.target)
        for place, name in enumerate(self.varied if "rule" in frame else (), 1):
            values = {run.spec.label: setting_of(run, name) for run in self}
            frame.insert(place, name, frame["rule"].map(values))
        return frame

    def draw(
        self,
        path: Path | str,
        *,
        panels: Sequence[str] = ("score", "staleness"),
        x: str | Sequence[str] = ("rounds", "time"),
        size: float | tuple[float, float] | None = None,
        title: str | None = None,
    ) -> None:
        """Write a figure: the score over rounds and over virtual time, and staleness, or other panels.

        The same results give the same bytes. Fonts are embedded, and text is text: no label is read as mathematics.

        Args:
            path: of a .pdf, .svg or .png file.
            panels: some of score (the first metric), the names of the metrics (accuracy and loss, unless the task
                declares others) and staleness.
            x: below curves of metrics: rounds, time or arrivals; for several, each has its panels.
            size: width in inches, such as 3.3 for one column of a page, or width and height. Narrow panels have smaller
                text and stand in several rows. Default: 4.5 inches for each panel.
            title: above the figure; default: the settings, or nothing if `size` is given.

        Raises:
            ConfigError: an unknown panel, x or kind of file, an impossible size, or a file that cannot be written.
            MissingExtraError: matplotlib is not installed.
        """
        require("matplotlib")
        from afflux.lab.results.figures import draw_comparison

        if title is None:
            title = run_folder.describe_setting(self.config, self, self.failures) if size is None else ""
        across = (x,) if isinstance(x, str) else tuple(x)
        with errors_of_writing(Path(path)):
            draw_comparison(self, title, self.config.target, Path(path), tuple(panels), across, size)

    def write(self, folder: Path | str) -> "SimulationResults":
        """Write the files of a run folder into `folder`, which is made if there is none; return these results.

        Raises:
            ConfigError: a file cannot be written, or a folder has its name.
        """
        run_folder.write_results(Path(folder), self, self.config, self.failures)
        return self

    def __repr__(self) -> str:
        found: list[Any] = [f"{run.spec.label}, seed {run.seed}: {run.final_score:.4f}" for run in self]
        return f"SimulationResults({'; '.join(map(str, [*found, *self.failures]))})"

    def __str__(self) -> str:
        if not find_spec("pandas"):
            return repr(self)
        return "\n".join([*map(str, self.failures), self.to_dataframe("table").set_index("rule").T.to_string()])


def setting_of(run: RunResult, name: str) -> Any:
    """Return the value of a setting of a run; its default if the run has not read it."""
    return run.settings.get(name, getattr(SimConfig, name))


def _differing_settings(mine: SimulationResults, other: SimulationResults, allow: Sequence[str]) -> set[str]:
    """Return the settings among `allow` in which the runs differ; raise ConfigError if they differ in others."""
    differing: dict[str, str] = {}
    # Not those that change no run: where the data are, what tables show, and the evaluations of single clients.
    for name in (name for name in SETTINGS if name not in {"data_dir", "target", *OF_CLIENTS}):
        values = [{setting_of(run, name) for run in runs} for runs in (mine, other)]
        if values[0] != values[1]:
            differing[name] = " and ".join(" or ".join(sorted(map(str, each))) for each in values)
    if refused := [name for name in differing if name not in {*allow, *mine.varied, *other.varied}]:
        listed = ", ".join(f"{name} is {differing[name]}" for name in refused)
        raise ConfigError(
            f"the runs differ in more than rule and seed: {listed}; allow={[*allow, *refused]} makes columns of them"
        )
    metrics = [[(one.name, one.unit, one.lower_is_better) for one in runs[0].metrics] for runs in (mine, other)]
    if metrics[0] != metrics[1]:
        texts = (", ".join(metric.title() for metric in runs[0].metrics) for runs in (mine, other))
        raise ConfigError(f"the runs have different metrics: {' and '.join(texts)}")
    varied = {name for setting in {*differing, *mine.varied, *other.varied} for name in _INPUTS_OF.get(setting, ())}
    if "clients" in varied and not any("clients" in run.inputs for run in (*mine, *other)):
        varied.add("data")  # the data sets of the clients: the task does not divide a common one
    if inputs := _differing_inputs(mine, other, varied):
        raise ConfigError(f"the runs had different inputs: {', '.join(inputs)}")
    return {*differing}


def _differing_inputs(mine: SimulationResults, other: SimulationResults, varied: set[str]) -> list[str]:
    """Return the inputs, except those in `varied`, that differ for one seed, or though no seed changes them."""
    inputs = []
    for name in sorted({name for run in mine for name in run.inputs} - varied):
        first, second = ({run.seed: run.inputs[name] for run in runs if name in run.inputs} for runs in (mine, other))
        values = [{*digests.values()} for digests in (first, second)]
        # Two seeds with one digest show that no seed changes the input; two digests, that the seed does.
        is_fixed = len(values[0]) == len(values[1]) == 1 and (name in _FIXED or max(len(first), len(second)) > 1)
        differs = any(first[seed] != second[seed] for seed in first.keys() & second.keys())
        if differs or (is_fixed and values[0] != values[1]):
            inputs.append(name)
    sizes = [{run.num_params for run in runs} for runs in (mine, other)]  # of initial params, which the seed may change
    return inputs or ["model"] * ("model" not in varied and sizes[0] != sizes[1])


def _labelled(results: SimulationResults, names: Sequence[str]) -> SimulationResults:
    """Return the results with labels that contain the values of settings which they do not contain yet."""
    new = [name for name in names if name not in results.varied]
    more = {run.spec.label: "".join(f", {name} {setting_of(run, name)}" for name in new) for run in results}
    return results.relabel({label: label + text for label, text in more.items()})


def _renamed(run: RunResult, labels: Mapping[str, str]) -> RunResult:
    """Return the run with other labels of its rule and its leader, by the present ones."""
    spec = replace(run.spec, label=labels.get(run.spec.label, run.spec.label))
    return replace(run, spec=spec, leader=labels.get(run.leader, run.leader))


def read_results(
    *folders: Path | str, labels: Mapping[str, str] | None = None, allow: Sequence[str] = ()
) -> SimulationResults:
    """Read the results of the runs in run folders, from their records and audit logs; nothing is executed.

    A command may still write to a folder: the runs that have ended are read.

    Args:
        folders: of `Simulation.run(out=...)`, or of the command line. The settings are those of the first.
        labels: other labels of rules, for tables and figures, by the present ones.
        allow: see `SimulationResults.merge`: the runs of several folders must have the same settings otherwise.

    Returns:
        The runs that have ended, as they were written, but without params; `RunResult.load` reads these from models/.

    Raises:
        ConfigError: a file is missing, or does not hold what a run writes; the runs of two folders
            are not comparable; or a rule and seed is in two folders.
    """
    if not folders:
        raise ConfigError("give at least one run folder")
    first, *others = (_read_folder(Path(folder)) for folder in folders)
    return first.merge(*others, allow=allow).relabel(labels or {})


def _read_folder(folder: Path) -> SimulationResults:
    lines = {line_key(line): line for line in all_lines([folder / FILE])}
    runs, failures = split_runs({number: read_line(folder, line) for number, line in enumerate(lines.values())})
    if not runs:
        raise ConfigError(f"{folder} holds no results of a run")
    path = folder / FOLDER / f"{file_stem(runs[0].spec.label, runs[0].seed)}.jsonl"
    return SimulationResults(runs, read_audit_log(path).header.settings(path), failures)
