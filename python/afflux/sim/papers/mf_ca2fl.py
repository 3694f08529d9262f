"""MF-CA2FL (Wang et al., ICLR 2024, section 5) at 8, 4, 2 and 1 bits beside CA2FL, for every codec.

All runs have CA2FL's learning rate of `rules_under_delays.TUNED`; nothing was tuned for few bits. One seed gives all of
them the same clients, delays and batches: the table compares the difference from CA2FL, or from 8 bits, seed by seed.
Accuracy is the mean of the evaluations in the last quarter of a run: a single evaluation is noisier.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from afflux import __version__
from afflux.sim.errors import ConfigError
from afflux.sim.papers.finished_runs import Outcome
from afflux.sim.papers.publishing import Measure, Page, job_config, markdown_table
from afflux.sim.results.run_result import SeedStatistics, seed_statistics
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import parse_rule

SERVER_LR, BUFFER_SIZE = 0.6, 10

#: The rules of the table; the first one is the reference for the others.
RULES = (
    "ca2fl",
    *(f"mf_ca2fl:bits={bits}:codec={codec}" for codec in ("affine", "affine-vector") for bits in (8, 4, 2, 1)),
    *(f"mf_ca2fl:bits={bits}:codec=rotated" for bits in (4, 2, 1)),
)
#: Rules with 2 bits, and the rule with 8 bits that the page compares them with in a sentence.
CLAIM = ("mf_ca2fl:bits=2:codec=affine", "mf_ca2fl:bits=2:codec=rotated"), "mf_ca2fl:bits=8:codec=affine"

#: Model, arrivals, arrivals between evaluations.
SETTINGS = {"digits": ("cnn", 1600, 40), "mnist": ("wkafl-cnn", 600, 100)}
DELAYS = "fadas-large"


class CodecResult(NamedTuple):
    """The results of one codec over seeds."""

    codec: str
    """Name of the codec; float32 without one."""
    row_bytes: int
    """Bytes of one client's row."""
    accuracy: SeedStatistics
    """Mean of the evaluations in the last quarter of a run."""
    difference: SeedStatistics
    """Difference of the accuracy from CA2FL's, seed by seed."""
    final: SeedStatistics
    """Accuracy after the last arrival."""


def make_jobs(data: str, seeds: Sequence[int], data_dir: str | None = None) -> list[Job]:
    """Return the runs, seed by seed; raise ConfigError for a data set that is not in `SETTINGS`."""
    if data not in SETTINGS:
        raise ConfigError(f"data is {data!r}; MF-CA2FL is run on {', '.join(SETTINGS)}")
    model, arrivals, every = SETTINGS[data]
    config = SimConfig(data=data, data_dir=data_dir, model=model, arrivals=arrivals, eval_every=every, delays=DELAYS)
    specs = [parse_rule(rule, {"buffer_size": BUFFER_SIZE, "server_lr": SERVER_LR}) for rule in RULES]
    return [Job(spec, seed, config=config) for seed in seeds for spec in specs]


def codec_results(jobs: Sequence[Job], outcomes: Sequence[Outcome], size: int) -> list[CodecResult]:
    """Return the table, in the order of `RULES`, for a model of `size` parameters."""
    table = []
    for rule in RULES:
        calibrate = next(job.spec for job in jobs if job.spec.label == rule).build().calibrate
        runs = _of(rule, outcomes)
        codec = calibrate.codec
        table.append(
            CodecResult(
                codec.name if codec else "float32",
                codec.row_bytes(size) if codec else 4 * size,
                seed_statistics([run.late_accuracy() for run in runs]),
                paired_difference(rule, RULES[0], outcomes),
                seed_statistics([run.final_accuracy for run in runs]),
            )
        )
    return table


def paired_difference(rule: str, other: str, outcomes: Sequence[Outcome]) -> SeedStatistics:
    """Return the difference of accuracy, `rule` minus `other`, over seeds."""
    by_seed = {run.seed: run.late_accuracy() for run in _of(other, outcomes)}
    return seed_statistics([run.late_accuracy() - by_seed[run.seed] for run in _of(rule, outcomes)])


def make_page(data: str, seeds: Sequence[int], jobs: Sequence[Job], outcomes: Sequence[Outcome], size: int) -> Page:
    """Make the page: one row per codec."""
    config = job_config(jobs[0])
    table = codec_results(jobs, outcomes, size)
    few, many = CLAIM
    title = (
        f"{data}, {config.model} ({size:,} parameters), {config.num_clients} clients (Dirichlet({config.alpha:g})), "
        f"{config.concurrency} at once, delays {config.delays}, {config.arrivals} arrivals"
    )
    content: dict[str, Any] = {
        "source": __doc__,
        "afflux": __version__,
        "setting": title,
        "options": f"server_lr {SERVER_LR:g}, buffers of {BUFFER_SIZE}, {config.local_steps} local steps of "
        f"{config.client_lr:g}",
        "parameters": size,
        "seeds": list(seeds),
        "codecs": [
            line._asdict() | {name: getattr(line, name)._asdict() for name in ("accuracy", "difference", "final")}
            for line in table
        ],
        "from_8_bits": {_codec(jobs, rule): paired_difference(rule, many, outcomes)._asdict() for rule in few},
    }
    return Page(f"mf-ca2fl-{data}", page_markdown(content), content, lambda path: _draw(table, size, title, path))


def page_markdown(content: dict[str, Any]) -> str:
    """Return the page's table, with a line above and a line below."""
    cells = [
        [
            f"`{line['codec']}`" if number else "`float32` (CA2FL)",
            f"{line['row_bytes']:,}",
            _percent(line["accuracy"]),
            _percent(line["difference"], "+") if number else "",
            _percent(line["final"]),
        ]
        for number, line in enumerate(content["codecs"])
    ]
    header = ("rows", "bytes per client", "accuracy, %", "difference from CA2FL", "after the last arrival, %")
    few = [f"`{codec}` {_percent(value, '+')}" for codec, value in content["from_8_bits"].items()]
    return (
        f"{content['setting']}; {content['options']}; seeds {', '.join(map(str, content['seeds']))}. Accuracy: mean of "
        "the evaluations in the last quarter of a run. Mean and standard deviation over seeds; differences seed by "
        "seed, in points.\n\n"
        + markdown_table(header, cells)
        + f"\n2 bits minus 8 bits (`affine-8`), seed by seed, in points: {', '.join(few)}.\n"
    )


def reproduce(data: str, seeds: Sequence[int], data_dir: str | None, measure: Measure) -> Page:
    """Run all codecs with all seeds."""
    jobs = make_jobs(data, seeds, data_dir)
    return make_page(data, seeds, jobs, measure(jobs), job_config(jobs[0]).num_parameters())


def _of(rule: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.rule == rule]


def _codec(jobs: Sequence[Job], rule: str) -> str:
    codec = next(job.spec for job in jobs if job.spec.label == rule).build().calibrate.codec
    return codec.name if codec else "float32"


def _percent(value: dict[str, float], sign: str = "") -> str:
    return f"{100 * value['mean']:{sign}.1f} ± {100 * value['std']:.1f}"


def _draw(table: Sequence[CodecResult], size: int, title: str, path: Path) -> None:
    """Write a PNG: accuracy against bits per element, a line for each kind of codec."""
    from matplotlib.figure import Figure

    from afflux.sim.papers.codec_errors import CODEC_MARKERS
    from afflux.sim.results.figures import style_axes

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    exact = table[0].accuracy
    axes.axhline(100 * exact.mean, color="#888888", linewidth=1, linestyle="--", label="CA2FL, float32 rows")
    low, high = 100 * (exact.mean - exact.std), 100 * (exact.mean + exact.std)
    axes.axhspan(low, high, color="#888888", alpha=0.12, linewidth=0)
    for kind in ("affine", "affine-vector", "rotated"):
        marker, colour = CODEC_MARKERS[kind]
        some = [line for line in table if line.codec.rpartition("-")[0] == kind]
        axes.errorbar(
            [8 * line.row_bytes / size for line in some],
            [100 * line.accuracy.mean for line in some],
            yerr=[100 * line.accuracy.std for line in some],
            marker=marker,
            color=colour,
            capsize=2,
            label=kind,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xlabel("bits per element of a client's row")
    axes.set_ylabel("test accuracy, % (bars: one standard deviation)")
    axes.legend(frameon=False)
    axes.set_title(title, fontsize=7)
    style_axes(axes)
    figure.savefig(path, dpi=150)
