"""`python -m bench.papers`: the runs of the papers' tables, kept as one JSON line each, and a check of such lines."""

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from hashlib import sha256
from math import isnan, nan
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
from psutil import virtual_memory

from afflux.lab.grid import SETTINGS, parse_grid, points
from afflux.lab.outcomes import Outcome, load_outcomes
from afflux.lab.publishing import Page, Show
from afflux.lab.results.finished_runs import (
    AGAIN,
    FailedRun,
    FinishedRuns,
    Job,
    all_lines,
    key_of,
    lines_of_jobs,
)
from afflux.lab.results.run_folder import locked
from afflux.lab.results.run_result import Evaluation, RunResult
from afflux.lab.runs.compare import compare, inputs_of_jobs
from afflux.ops import default_threads
from afflux.ops.errors import ConfigError
from afflux.rules.specs import parse_rule
from afflux.sim.clients.flat_model import has_device
from afflux.sim.errors import require
from afflux.sim.workload.config import SimConfig
from bench.papers.all_tables import TABLES
from bench.papers.comparison import Line, line_of, table_page
from bench.papers.long_runs import FinishedLongRuns, LongRun, folder_name
from bench.papers.paper_tables import TRIALS_SEED, Cell, Search, Table
from bench.papers.staleness_pages import PAGES

#: The largest difference of a CNN's final accuracy between the kernels of two machines.
CNN_DIFFERENCE = 0.025
#: The largest difference of an accuracy between CPUs that was seen, of logistic regression.
CPU_DIFFERENCE = 1e-4
#: Folder in that of the finished runs, which holds the long runs that have begun.
UNFINISHED = "unfinished"


class Budget(NamedTuple):
    """The ends of a command; the next one continues."""

    runs: int | None = None
    hours: float | None = None  #: of CPU time, of the runs that this command brings to an end
    processes: int | None = None


NO_LIMITS = Budget()

#: Returns the evaluations of a line.
Rows = Callable[[Mapping[str, Any]], Sequence[Evaluation]]


class Changes(NamedTuple):
    """What differs from the settings of the cells."""

    data_dir: str | None = None
    rounds: int = 0  #: if not 0, the server steps of each run
    device: str = "cpu"


UNCHANGED = Changes()


def job_of(cell: Cell, seed: int, changes: Changes = UNCHANGED) -> Job:
    """Return the run of a cell."""
    config = SimConfig(data_dir=changes.data_dir, device=changes.device, **cell.settings)
    config = replace(config, rounds=changes.rounds) if changes.rounds else config
    return Job(parse_rule(cell.rule), seed, config=config, may_diverge=True)


class Run(NamedTuple):
    """One run of a table."""

    cell: Cell
    job: Job
    is_trial: bool = False


class Choice(NamedTuple):
    """The options and settings of a trial."""

    text: str  #: all of them
    options: str  #: those of the rule, with a colon before each
    settings: tuple[tuple[str, Any], ...]

    def of(self, cell: Cell, name: str) -> Cell:
        """Return the cell with them, and the name."""
        return cell._replace(
            name=name, rule=cell.rule + self.options, settings={**cell.settings, **dict(self.settings)}
        )


def trials_of(search: Search) -> dict[Choice, Cell]:
    """Return the trials by what they have beyond the search's rule and settings."""
    grid = points([parse_rule(search.rule)], parse_grid(search.ranges), SimConfig(), search.trials, TRIALS_SEED)
    choices = []
    for point in grid:
        texts = {name: f"{name}={value}" for name, value in point.chosen.items()}
        options = "".join(f":{text}" for name, text in texts.items() if name not in SETTINGS)
        settings = tuple((name, getattr(point.config, name)) for name in texts if name in SETTINGS)
        choices.append(Choice(":".join(texts.values()), options, settings))
    own = Cell("", search.rule, search.settings)
    return {one: one.of(own, f"{search.name}, trial {number}, {one.text}") for number, one in enumerate(choices)}


def runs_of(
    table: Table,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    lines: Sequence[dict[str, Any]],
    changes: Changes = UNCHANGED,
) -> tuple[list[Run], int]:
    """Return the runs of the cells, trials first, and the number of runs that wait for trials.

    Cells of a search whose trials have all diverged wait, too.
    """

    def runs(cells: Sequence[Cell], seeds: Sequence[int], *, are_trials: bool = False) -> list[Run]:
        pairs = [(seed, cell) for seed in seeds for cell in cells if not cell.seeds or seed < cell.seeds]
        return [Run(cell, job_of(cell, seed, changes), are_trials) for seed, cell in pairs]

    searches = {cell.search.name: trials_of(cell.search) for cell in cells if cell.search is not None}
    trials = runs([cell for choices in searches.values() for cell in choices.values()], [TRIALS_SEED], are_trials=True)
    ended, timed = lines_of_jobs(lines, [run.job for run in trials]), rows_of(table, lines)
    places, best = iter(range(len(trials))), dict[str, Choice]()
    for name, choices in searches.items():
        evaluations = {choice: timed(ended[place]) for choice in choices if (place := next(places)) in ended}
        values = {choice: table.reading.of(rows) for choice, rows in evaluations.items() if rows}
        if values and len(evaluations) == len(choices):
            best[name] = max(values, key=lambda choice: values[choice])
    ready = []
    for cell in cells:
        if cell.search is None:
            ready.append(cell)
        elif choice := best.get(cell.search.name):
            ready.append(choice.of(cell, f"{cell.name}, {choice.text}"))
    return trials + runs(ready, seeds), (len(cells) - len(ready)) * len(seeds)


def reproduce(
    table: Table,
    folder: Path,
    seeds: Sequence[int],
    *,
    pattern: str = "*",
    changes: Changes = UNCHANGED,
    limits: Budget = NO_LIMITS,
    show: Show | None = None,
) -> tuple[Page, int]:
    """Make the runs that `folder` does not hold yet, and return the page of all that have ended.

    Args:
        table: one with cells, or one that is computed without training.
        folder: holds the finished runs of all tables, NAME.jsonl; runs that two tables share are made once.
        seeds: of each cell.
        pattern: of the names of the cells, with * and ?.
        changes: what differs from the settings of the cells.
        limits: the ends of this call.
        show: see `measure`.

    Returns:
        The page, and the number of runs that are not finished.

    Raises:
        ConfigError: a table that is not run here, no cell with that name, data are missing, finished runs began with
            other data, or a search whose trials have all diverged.
    """
    require("torch", "matplotlib")
    if table.computed:
        folder.mkdir(parents=True, exist_ok=True)
        return PAGES[table.name](table), 0
    if not table.cells:
        raise ConfigError(f"{table.name} is not run: {table.open}")
    cells = [cell for cell in table.cells if fnmatchcase(cell.name, pattern)]
    if table.clock:  # with the clock's cells of the same settings
        settings = [{**cell.settings, "eval_every": 0} for cell in cells]
        clocks = [cell for cell in table.cells if parse_rule(cell.rule).name == table.clock]
        clocks = [cell for cell in clocks if {**cell.settings, "eval_every": 0} in settings]
        cells = [cell for cell in table.cells if cell in cells or cell in clocks]
    if not cells:
        raise ConfigError(f"{table.name} has no cell {pattern!r}; its first one is {table.cells[0].name!r}")
    for _ in range(2):  # the trials, and then the cells that waited for them
        runs, waiting = runs_of(table, cells, seeds, _lines_in(folder), changes)
        limits, left = _make(table, folder, runs, limits, show)
        if not waiting or left or limits.hours == 0:
            break
    else:
        raise ConfigError(f"{table.name}: the clients diverged in every trial of a method")
    lines = lines_of_jobs(_lines_in(folder), [run.job for run in runs])
    return page_of(table, runs, lines, rows_of(table, _lines_in(folder))), left + waiting


def _make(table: Table, folder: Path, runs: Sequence[Run], limits: Budget, show: Show | None) -> tuple[Budget, int]:
    """Make the runs that `folder` does not hold yet; return what the limits leave, and the number of runs left."""
    different: dict[str, Run] = {}
    for run in runs:  # two cells of a figure may show one
        different.setdefault(key_of(run.job), run)
    runs = [*different.values()]
    jobs = [run.job for run in runs]
    if table.long and jobs:
        device = (jobs[0].config or SimConfig()).device
        here = machine(device) if has_device(device) else {}
        jobs = [job._replace(make=LongRun(folder / UNFINISHED / folder_name(job, here))) for job in jobs]
    inputs = inputs_of_jobs(jobs, SimConfig())
    folder.mkdir(parents=True, exist_ok=True)
    spent = 0.0

    def facts(index: int, result: RunResult | None) -> dict[str, Any]:
        nonlocal spent
        place = {"table": table.name, "cell": runs[index].cell.name}
        if result is None:
            return place
        spent += result.seconds
        more = {} if table.facts is None else table.facts(jobs[index], result)
        return place | record(result, inputs[index]) | dict(more)

    def enough() -> bool:
        return limits.hours is not None and spent >= 3600 * limits.hours

    most = max(1, int(virtual_memory().available / 1e9 / table.memory))
    processes = min(limits.processes or default_threads(), most)
    with locked(folder), ExitStack() as screen:
        outcomes = load_outcomes(sorted(folder.glob("*.jsonl")), jobs, inputs)
        ended: dict[int, Any] = {index: [outcome] for index, outcome in outcomes.items()}
        finished = FinishedLongRuns(folder / f"{table.name}.jsonl", jobs, inputs, facts, ended)
        for index in ended:
            finished.remove_folder(index)
        if len(ended) < len(jobs) and limits.hours != 0:
            titles = [f"{run.cell.name}, seed {run.job.seed}" for run in runs]
            watch = (
                screen.enter_context(show(titles, max((job.config or SimConfig()).arrivals for job in jobs)))
                if show
                else None
            )
            options: dict[str, Any] = {"processes": processes, "watch": watch, "finished": finished}
            try:
                compare(jobs, SimConfig(), most=limits.runs, enough=enough, **options)
            except KeyboardInterrupt as error:
                error.add_note(
                    f"{len(jobs) - _left(jobs, finished)} of {len(jobs)} runs were finished; the same command continues"
                )
                raise
            with suppress(OSError):
                (folder / UNFINISHED).rmdir()  # runs that have not ended are in it
    count = len(finished) - len(ended)
    runs_left = None if limits.runs is None else limits.runs - count
    hours_left = None if limits.hours is None else max(0.0, limits.hours - spent / 3600)
    return limits._replace(runs=runs_left, hours=hours_left), _left(jobs, finished)


def _left(jobs: Sequence[Job], finished: FinishedRuns) -> int:
    """Return the number of runs that the same command makes again, or has not begun."""
    return len(jobs) - sum(not (isinstance(run, FailedRun) and run.status in AGAIN) for run in finished.values())


def _lines_in(folder: Path, table: str = "*") -> list[dict[str, Any]]:
    """Return the lines of the finished runs, each with its device beside the settings."""
    lines = all_lines(sorted(folder.glob(f"{table}.jsonl")))
    return [line | {"device": line["config"].get("device", "cpu")} for line in lines]


def folder_page(table: Table, folder: Path, lines: Sequence[dict[str, Any]] | None = None) -> Page | None:
    """Return the page of all cells and seeds that have a finished run of the paper's length; None if there is none.

    `lines` are those of the folder, if they have been read.
    """
    if table.computed:
        return PAGES[table.name](table)
    records = _on_any_device(_lines_in(folder) if lines is None else lines)
    own = [line for line in records if line.get("table") == table.name]
    seeds = {line["seed"] for line in own if line["config"].get("part") != "validation"}
    runs, _ = runs_of(table, table.cells, sorted({*range(table.seeds), *seeds}), records)
    lines_of_runs = lines_of_jobs(records, [run.job for run in runs])
    return page_of(table, runs, lines_of_runs, rows_of(table, records)) if lines_of_runs else None


def folder_pages(folder: Path, table: Table | None = None) -> Iterator[Page]:
    """Yield all pages of runs that the folder holds, made anew from its lines.

    With `table`: its page, and those that show runs of it.
    """
    lines = _lines_in(folder)
    settings = {(cell.rule, repr(cell.settings)) for cell in (table.cells if table else ())}
    for other in TABLES.values():
        shares = table is None or not settings.isdisjoint((cell.rule, repr(cell.settings)) for cell in other.cells)
        page = None
        if other is table or (shares and other.cells and (folder / f"{other.name}.md").exists()):
            page = folder_page(other, folder, lines)
        if page is not None:
            yield page


def _on_any_device(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines as if all were of the CPU: for a page a run counts wherever it was made, the last line of it."""

    def settings(line: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in line["config"].items() if name != "device"}

    return [line | {"config": settings(line)} for line in lines]


def rows_of(table: Table, lines: Sequence[Mapping[str, Any]]) -> Rows:
    """Return a function that returns the evaluations of a line, those up to the end of the table's equal time."""

    def setting(line: Mapping[str, Any]) -> str:
        own = {name: value for name, value in line["config"].items() if name not in ("client_lr", "eval_every")}
        return json.dumps([line["seed"], own], sort_keys=True)

    own = [line for line in lines if table.clock and line["evaluations"]]
    ends = {setting(line): line["evaluations"][-1][2] for line in own if line["rule"].partition(":")[0] == table.clock}

    def rows(line: Mapping[str, Any]) -> Sequence[Evaluation]:
        evaluations = _evaluations(line)
        end = ends.get(setting(line)) if table.clock else None
        if end is None or not evaluations:
            return evaluations
        before = [row for row in evaluations if row.virtual_time <= end]
        last = before[-1]
        return [*before, Evaluation(last.arrivals, last.version, end, *last[3:])]  # the model of that moment

    return rows


def page_of(table: Table, runs: Sequence[Run], lines: Mapping[int, Mapping[str, Any]], timed: Rows) -> Page:
    """Return the page of the cells with finished runs, from the lines of the runs by index; `timed`: see `rows_of`."""
    if table.page is not None:
        page: Page = table.page(table, runs, lines, timed)
        return page
    drawn = {cell.name: [run for run in outcomes if run.evaluations] for cell, outcomes, _ in _finished(runs, lines)}
    curves = {name: outcomes for name, outcomes in drawn.items() if outcomes}
    seeds = sorted({runs[index].job.seed for index in lines})
    different = {id(line): line for line in lines.values()}.values()  # two cells of a figure may show one run
    on_gpu = Counter(line["machine"]["cpu"] for line in different if line["device"] != "cpu" and "machine" in line)
    where = "".join(f"; {count} of {len(different)} runs on {name}" for name, count in sorted(on_gpu.items()))
    return table_page(table, _lines_of(table, runs, lines), seeds, curves, where)


def _finished(runs: Sequence[Run], lines: Mapping[int, Mapping[str, Any]]) -> list[tuple[Cell, list[Outcome], float]]:
    """Return the cells that have finished runs, these runs, and their CPU seconds."""
    content: dict[str, tuple[Cell, list[Mapping[str, Any]]]] = {}
    for index in sorted(lines):
        content.setdefault(runs[index].cell.name, (runs[index].cell, []))[1].append(lines[index])
    order = {name: place for place, name in enumerate(dict.fromkeys(run.cell.name for run in runs))}
    return [
        (cell, [Outcome.of_line(line) for line in own], sum(line.get("seconds", 0.0) for line in own))
        for _, (cell, own) in sorted(content.items(), key=lambda item: order[item[0]])
    ]


def _lines_of(table: Table, runs: Sequence[Run], lines: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    return [
        line_of(table, cell, [run.evaluations for run in outcomes], seconds)
        for cell, outcomes, seconds in _finished(runs, lines)
    ]


def record(result: RunResult, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of a finished run that show whether another machine has made the same one."""
    rows = [
        [e.arrivals, e.version, float(f"{e.virtual_time:.6g}"), e.accuracy, float(f"{e.loss:.5g}")]
        for e in result.evaluations
    ]
    return {
        "evaluations": rows,
        "schedule": schedule_digest(result, inputs),
        "params": result.digest,
        "machine": machine(result.settings.get("device", "cpu")),
        "seconds": round(result.seconds, 2),
    }


def schedule_digest(result: RunResult, inputs: Mapping[str, str]) -> str:
    """Return the SHA-256 of what does not depend on torch's kernels.

    That are the division of the data, the initial params, and for each arrival the client and its staleness; and the
    virtual time of each evaluation.
    """
    digest = sha256((inputs.get("clients", "") + result.first_params_sha256).encode())
    digest.update(result.clients.astype("<i8").tobytes())
    if not result.spec.build().needs.handed_in:  # else its steps depend on the values of the updates
        digest.update(result.staleness.astype("<i8").tobytes())
    digest.update(np.array([one.virtual_time for one in result.evaluations], "<f8").tobytes())
    return digest.hexdigest()


def machine(device: str = "cpu") -> dict[str, str]:
    """Return what the bits of torch's training depend on: processor (or GPU), torch and its kernels."""
    import torch

    return {
        "cpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "torch": str(torch.__version__),
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file.read().partition("\n\n")[0].splitlines() if ":" in line)
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): text.strip() for name, text in lines.items()}
    return f"{facts.get('model name', platform.machine())}, {facts.get('cpu family', '?')}/{facts.get('model', '?')}"


class State(NamedTuple):
    """The state of a table in a folder of finished runs."""

    table: Table
    runs: int
    wanted: int
    hours: float  #: CPU hours of the finished runs
    difference: float  #: mean absolute difference from the paper; nan: none yet, or nothing to compare


def states(folder: Path) -> list[State]:
    """Return the state of each table."""
    records = _on_any_device(_lines_in(folder))
    content = []
    for table in TABLES.values():
        runs, waiting = runs_of(table, table.cells, range(table.seeds), records)
        lines = lines_of_jobs(records, [run.job for run in runs])
        differences = [abs(line.difference) for line in _lines_of(table, runs, lines)]
        mean = float(np.nanmean(differences)) if not all(map(isnan, differences)) else nan
        hours = sum(line.get("seconds", 0.0) for line in lines.values() if line.get("table") == table.name) / 3600
        content.append(State(table, len(lines), len(runs) + waiting, hours, mean))
    return content


class Record(msgspec.Struct, frozen=True):
    """What a line holds, beside the outcome, for a later check."""

    cell: str
    schedule: str
    params: str
    machine: dict[str, str]


class Checked(NamedTuple):
    """A finished run that was made again."""

    lines: list[str]  #: what was compared
    compared: str  #: params, if processor, torch and kernels are those of the record; accuracies; or nothing


def check(folder: Path, data_dir: str | None, name: str | None = None, seed: int | None = None) -> Checked:
    """Make a finished run again, no trial of a search, that of a GPU on the CPU if there is none; compare it.

    The schedule must be equal on every machine; the params where processor, torch and kernels are those of the record.
    Elsewhere each accuracy of logistic regression on CPUs must be within 1e-4. For other models the reading of the
    table must be within twice its deviation over three seeds or more, or 2.5 points, whichever is larger.

    Args:
        folder: of the finished runs.
        data_dir: the folder of the data.
        name: of a table; default any.
        seed: draws the run; default at random.

    Raises:
        ConfigError: there is no finished run, or something differs.
    """
    choices = []
    for table in TABLES.values():
        if name in (None, table.name) and table.cells:
            records = _on_any_device(_lines_in(folder, table.name))
            runs, _ = runs_of(table, table.cells, range(table.seeds), records, Changes(data_dir))
            lines = lines_of_jobs(records, [run.job for run in runs])
            ended = [index for index, line in lines.items() if line["evaluations"] and not runs[index].is_trial]
            choices += [(table, runs, lines, index) for index in ended]
    if not choices:
        raise ConfigError(f"{folder} holds no finished run" + (f" of {name}" if name else ""))
    table, runs, lines, index = Random(seed).choice(choices)
    cell, job, _ = runs[index]
    if (device := lines[index]["device"]) != "cpu" and has_device(device):
        job = job._replace(config=replace(job.config or SimConfig(), device=device))
    try:
        then = msgspec.convert(lines[index], Record)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder / table.name}.jsonl holds a run that cannot be checked: {error}") from None
    report = [f"{table.name}: {then.cell}, seed {job.seed}, of {', '.join(then.machine.values())}"]
    results = compare([job], SimConfig())
    if not results:
        raise ConfigError("\n".join([*report, "a client diverged"]))
    inputs = inputs_of_jobs([job], SimConfig())[0]
    now = msgspec.convert({"cell": then.cell} | record(results[0], inputs), Record)
    _agree("schedule", then.schedule, now.schedule, report)
    if then.machine == now.machine:
        _agree("params", then.params, now.params, report)
        return Checked(report, "params")
    report.append(f"here: {', '.join(now.machine.values())}; params may differ there")
    before, after = _evaluations(lines[index]), results[0].evaluations
    if device == "cpu" and (job.config or SimConfig()).model == "logreg":
        apart = max(abs(a.score - b.score) for a, b in zip(before, after, strict=True))
        report.append(f"accuracies: {len(after)}, at most {apart:.2g} apart; they may be {CPU_DIFFERENCE:g} apart")
        return _within(apart, CPU_DIFFERENCE, report)
    others = [_evaluations(line) for one, line in lines.items() if runs[one].cell.name == cell.name]
    seeds, was, is_now = line_of(table, cell, others, 0.0), table.reading.of(before), table.reading.of(after)
    if len(seeds.values) < 3 or any(map(isnan, [*seeds.values, was, is_now])):
        return Checked([*report, "fewer than three seeds: accuracies are not compared"], "")
    most = max(2 * float(np.std(seeds.values, ddof=1)), CNN_DIFFERENCE)
    report.append(f"{table.reading.name}: {is_now:.4f}, it was {was:.4f}; they may be {most:.4f} apart")
    return _within(abs(is_now - was), most, report)


def _within(apart: float, most: float, report: list[str]) -> Checked:
    if not apart <= most:
        raise ConfigError("\n".join(report))
    return Checked(report, "accuracies")


def _evaluations(line: Mapping[str, Any]) -> Sequence[Evaluation]:
    return Outcome.of_line(line).evaluations


def _agree(what: str, then: str, now: str, report: list[str]) -> None:
    report.append(f"{what}: {now[:16]}... " + ("equal" if then == now else f"differs, it was {then[:16]}..."))
    if then != now:
        raise ConfigError("\n".join(report))
