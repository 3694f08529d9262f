"""Every preset under FADAS's mild and large delays, on one task, with the clients of `SimConfig`'s defaults.

The options in `TUNED` are the same for both delays. The learning rates were picked from two to five values
by the mean accuracy under both delays after 400 arrivals on the digits, with seed 9, which no table uses; the rest are
the presets' defaults. That is a coarse and uneven search; some of the best values lie at an edge of the values tried.
The table shows how rules behave; it is no ranking.
A synchronous rule has the same accuracy under both delays: its waiting costs virtual time.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from afflux import __version__
from afflux.rules import RULES
from afflux.sim.errors import ConfigError
from afflux.sim.papers.finished_runs import Outcome
from afflux.sim.papers.publishing import Measure, Page, final_accuracy, job_config, markdown_table
from afflux.sim.results.run_result import SeedStatistics, seed_statistics
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import parse_rule

DELAYS = ("fadas-mild", "fadas-large")

#: Rules with their options; a preset that is not here runs with its defaults. A gradient's server_lr of .3 is an
#: update's of 1: three local steps of .1.
TUNED = (
    "fedavg:server_lr=1",
    "fedbuff:server_lr=2",
    "fedasync:alpha=1",
    "fedadam:server_lr=0.01",
    "fedyogi:server_lr=0.03",
    "fedadagrad:server_lr=0.03",
    "fedams:server_lr=0.01",
    "fadas:server_lr=0.001",
    "fadas:delay_adaptive=inverse:server_lr=0.003",
    "afa_cd:server_lr=0.3",
    "afa_cs:server_lr=0.3",
    "ca2fl:server_lr=0.6",
    "mf_ca2fl:server_lr=0.6",  # CA2FL's value; this rule was not tuned
    "wkafl:server_lr=0.1",
    "twafl:server_lr=0.45",
    "sasgd:server_lr=0.3",
    "gsgm:server_lr=0.3",
    "zenopp:server_lr=0.1",
)

BUFFER_SIZE = 10

#: Model and arrivals for each data set: about ten minutes on two cores.
SETTINGS = {"digits": ("cnn", 800), "mnist": ("logreg", 600)}


class RuleResult(NamedTuple):
    """One rule, by delays: final accuracy and virtual time over seeds, and the largest staleness of all."""

    rule: str
    options: str
    accuracy: dict[str, SeedStatistics]
    time: dict[str, SeedStatistics]
    max_staleness: dict[str, int]


def make_jobs(data: str, seeds: Sequence[int], data_dir: str | None = None) -> list[Job]:
    """Return the runs, seed by seed; raise ConfigError for a data set that is not in `SETTINGS`."""
    if data not in SETTINGS:
        raise ConfigError(f"data is {data!r}; the rules are compared on {', '.join(SETTINGS)}")
    model, arrivals = SETTINGS[data]
    common = SimConfig(
        data=data, data_dir=data_dir, model=model, arrivals=arrivals, eval_every=arrivals // 10, examples="batch"
    )
    settings = [replace(common, delays=delays) for delays in DELAYS]
    tuned = {text.partition(":")[0] for text in TUNED}
    texts = [*TUNED, *(name for name in RULES if name not in tuned)]
    specs = [parse_rule(text, {"buffer_size": BUFFER_SIZE}) for text in texts]
    return [Job(spec, seed, config=config) for seed in seeds for config in settings for spec in specs]


def rule_results(jobs: Sequence[Job], results: Sequence[Outcome]) -> list[RuleResult]:
    """Return the table, best mean accuracy under large delays first."""
    table = []
    for label in dict.fromkeys(job.spec.label for job in jobs):
        runs = {
            delays: [
                result
                for job, result in zip(jobs, results, strict=True)
                if job.spec.label == label and job_config(job).delays == delays
            ]
            for delays in DELAYS
        }
        name, _, options = label.partition(":")
        table.append(
            RuleResult(
                name,
                options.replace(":", ", "),
                {delays: final_accuracy(some) for delays, some in runs.items()},
                {
                    delays: seed_statistics([run.evaluations[-1].virtual_time for run in some])
                    for delays, some in runs.items()
                },
                {delays: max(run.max_staleness for run in some) for delays, some in runs.items()},
            )
        )
    return sorted(table, key=lambda line: -line.accuracy[DELAYS[-1]].mean)


def make_page(data: str, seeds: Sequence[int], jobs: Sequence[Job], results: Sequence[Outcome]) -> Page:
    """Make the page: one row per rule."""
    config = job_config(jobs[0])
    table = rule_results(jobs, results)
    laws = [delays.removeprefix("fadas-") for delays in DELAYS]
    header = ["rule", "options", *(f"{what}, {law}" for what in ("accuracy, %", "time", "staleness") for law in laws)]
    cells = [
        [
            line.rule,
            line.options,
            *(f"{100 * line.accuracy[delays].mean:.1f} ± {100 * line.accuracy[delays].std:.1f}" for delays in DELAYS),
            *(f"{line.time[delays].mean:.0f}" for delays in DELAYS),
            *(f"{line.max_staleness[delays]}" for delays in DELAYS),
        ]
        for line in table
    ]
    title = (
        f"{data}, {config.model}, {config.num_clients} clients (Dirichlet({config.alpha:g})), {config.concurrency} at "
        f"once, buffers of {BUFFER_SIZE}, {config.arrivals} arrivals"
    )
    markdown = (
        f"{title}, {config.local_steps} local steps of {config.client_lr:g}; FADAS's mild and large delays.\n"
        f"Accuracy and virtual time (in units of 10 s) after the last arrival, mean and standard deviation over seeds "
        f"{', '.join(map(str, seeds))}; largest staleness of an arrival.\n\n" + markdown_table(header, cells)
    )
    content = {
        "setting": title,
        "afflux": __version__,
        "seeds": list(seeds),
        "rules": [
            line._asdict()
            | {"accuracy": {delays: value._asdict() for delays, value in line.accuracy.items()}}
            | {"time": {delays: value._asdict() for delays, value in line.time.items()}}
            for line in table
        ],
    }
    return Page("rules", markdown, content, lambda path: _draw(table, title, path))


def reproduce(data: str, seeds: Sequence[int], data_dir: str | None, measure: Measure) -> Page:
    """Run all rules under both delays."""
    jobs = make_jobs(data, seeds, data_dir)
    return make_page(data, seeds, jobs, measure(jobs))


def _draw(table: Sequence[RuleResult], title: str, path: Path) -> None:
    """Write a PNG: a row per rule, a dot and one standard deviation per delay law."""
    from matplotlib.figure import Figure

    from afflux.sim.results.curves import COLOURS

    figure = Figure(figsize=(8, 1.6 + 0.32 * len(table)), layout="constrained")
    axes = figure.subplots()
    for index, delays in enumerate(DELAYS):
        values = [line.accuracy[delays] for line in table]
        places = [row + 0.12 * (2 * index - 1) for row in range(len(table))]
        axes.errorbar(
            [100 * value.mean for value in values],
            places,
            xerr=[100 * value.std for value in values],
            fmt="os"[index],
            color=COLOURS[index].picture,
            capsize=2,
            label=delays,
        )
    axes.set_yticks(range(len(table)), [line.rule + _mark(line) for line in table])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("test accuracy after the last arrival, % (bars: one standard deviation over seeds)")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=150)


def _mark(line: RuleResult) -> str:
    """Return the options that are words, which distinguish two lines of one rule."""
    words = [part.partition("=")[2] for part in line.options.split(", ") if not part[-1:].isdigit()]
    return f" ({', '.join(words)})" if any(words) else ""
