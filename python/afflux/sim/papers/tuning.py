"""`tune`: a grid of settings of a simulation, as `afflux compare --grid`."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from afflux.ops.validation import brief
from afflux.sim.errors import ConfigError
from afflux.sim.papers.grid import TuningResults, command, grid_page, parse_grid, run_grid
from afflux.sim.papers.publishing import Measure, Page, measure, publish
from afflux.sim.runs.library import Simulation
from afflux.sim.workload.rule_specs import format_option


def tune(
    simulation: Simulation,
    grid: Mapping[str, Sequence[Any]],
    *,
    out: Path | str | None = None,
    processes: int = 1,
    workers: int = 1,
) -> TuningResults:
    """Find the best setting of each rule on a validation part, and run it with all seeds on the test part.

    Each rule is run with all combinations of the grid and the first seed. The best setting has the largest mean
    accuracy over the last quarter of the run; a setting with which clients diverge is never the best.

    Args:
        simulation: its rules, seeds, task and settings.
        grid: values by name: a setting such as client_lr, an option of the rules that have it such as server_lr, or
            RULE.OPTION. The names of settings are those of `SimConfig`, also if the simulation trains by `sgd(...)`.
        out: a folder for grid.md, grid.json, grid.png and the finished runs; default: nothing is written. If the folder
            holds finished runs of the same grid, these are not made again. Another model or other data are an error.
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
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ConfigError(f"grid {name}: {brief(values)} is no sequence of values, such as [{brief(values)}]")
    axes = parse_grid([f"{name}={','.join(map(format_option, values))}" for name, values in grid.items()])
    specs = list({job.spec.label: job.spec for job in simulation.jobs}.values())
    seeds = list(dict.fromkeys(job.seed for job in simulation.jobs))
    options: dict[str, Any] = {"processes": processes, "workers": workers, "task": simulation.task, "progress": False}
    found: list[TuningResults] = []

    def make(run: Measure) -> Page:
        found.append(run_grid(specs, axes, seeds, simulation.config, run))
        return grid_page(found[0])

    if out is None:
        with TemporaryDirectory() as folder:
            make(partial(measure, folder=Path(folder), **options))
    else:
        publish(Path(out), make, command(specs, axes, seeds, simulation.config), **options)
    return found[0]
