"""The table of `python -m bench.papers mf-ca2fl`: MF-CA2FL at few bits beside CA2FL, for every codec."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from afflux import __version__
from afflux.lab.outcomes import Outcome
from afflux.lab.publishing import Measure, Page, final_score, markdown_table
from afflux.lab.results.curves import COLOURS
from afflux.lab.results.finished_runs import Job
from afflux.lab.results.run_result import SeedStatistics, seed_statistics
from afflux.lab.tasks.registry import build_task
from afflux.ops import codecs
from afflux.ops.validation import known
from afflux.rules.specs import parse_rule
from afflux.sim.clients.flat_model import FlatModel, make_module
from afflux.sim.workload.config import SimConfig

#: The first one is the reference for the others. All have the server_lr that was picked for CA2FL.
CODEC_RULES = (
    "ca2fl",
    *(f"mf_ca2fl:bits={bits}:codec={codec}" for codec in ("affine", "affine-vector") for bits in (8, 4, 2, 1)),
    *(f"mf_ca2fl:bits={bits}:codec=rotated" for bits in (4, 2, 1)),
)
#: By data set: model, arrivals, arrivals between evaluations.
CODEC_SETTINGS = {"digits": ("cnn", 1600, 40), "mnist": ("wkafl-cnn", 600, 100)}
CODEC_OPTIONS = {"buffer_size": 10, "server_lr": 0.6}
#: Markers of the kinds of codecs that round, in the order of the colours.
CODEC_MARKERS = dict(zip(dict.fromkeys(codec.coding for codec in codecs.ROUNDING), cycle("xPos^Dv*<>"), strict=False))
#: Rules with 2 bits, and the rule with 8 bits that the page compares them with in a sentence.
CODEC_CLAIM = ("mf_ca2fl:bits=2:codec=affine", "mf_ca2fl:bits=2:codec=rotated"), "mf_ca2fl:bits=8:codec=affine"
CODEC_SOURCE = """\
MF-CA2FL (Wang et al., FL-ICML 2023 and ICLR 2024, section 5) at 8, 4, 2 and 1 bits beside CA2FL, for every codec.

All runs have the learning rate that was picked for CA2FL; nothing was tuned for few bits. One seed gives all of them
the same clients, delays and batches: the table compares the difference from CA2FL, or from 8 bits, seed by seed.
Accuracy is the mean of the evaluations in the last quarter of a run: a single evaluation is noisier.
"""


def mf_ca2fl(data: str, seeds: Sequence[int], measure: Measure, data_dir: str | None = None) -> Page:
    """Make the runs of all rules, seed by seed, and their page; raise ConfigError for an unknown data set."""
    known("data", data, CODEC_SETTINGS)
    model, arrivals, every = CODEC_SETTINGS[data]
    config = SimConfig(
        data=data, data_dir=data_dir, model=model, arrivals=arrivals, eval_every=every, delays="fadas-large"
    )
    specs = [parse_rule(rule, CODEC_OPTIONS) for rule in CODEC_RULES]
    outcomes = measure([Job(spec, seed, config=config) for seed in seeds for spec in specs])
    runs = {rule: outcomes[place :: len(specs)] for place, rule in enumerate(CODEC_RULES)}
    return codecs_page(config, runs, seeds)


def num_parameters(config: SimConfig) -> int:
    """Return the number of trained parameters of the model, d."""
    task = build_task(config)
    return len(FlatModel(make_module(task.model, 0), task.roles).params)


def codecs_page(config: SimConfig, runs: Mapping[str, Sequence[Outcome]], seeds: Sequence[int]) -> Page:
    """Make the page of the runs of each rule, one for each seed: one row per codec."""
    size, reference = num_parameters(config), runs[CODEC_RULES[0]]
    codecs = {rule: parse_rule(rule).build().calibrate.codec for rule in runs}
    names = {rule: codec.name if codec else "float32" for rule, codec in codecs.items()}
    few, many = CODEC_CLAIM
    content: dict[str, Any] = {
        "source": CODEC_SOURCE,
        "afflux": __version__,
        "setting": f"{config.data}, {config.model} ({size:,} parameters), {config.num_clients} clients "
        f"(Dirichlet({config.alpha:g})), {config.concurrency} at once, delays {config.delays}, "
        f"{config.arrivals} arrivals",
        "options": f"server_lr {CODEC_OPTIONS['server_lr']:g}, buffers of {CODEC_OPTIONS['buffer_size']}, "
        f"{config.local_steps} local steps of {config.client_lr:g}",
        "parameters": size,
        "seeds": list(seeds),
        "codecs": [
            {
                "codec": names[rule],
                "row_bytes": codec.row_bytes(size) if codec else 4 * size,
                "accuracy": seed_statistics([run.late_score() for run in runs[rule]])._asdict(),
                "difference": _paired(runs[rule], reference)._asdict(),
                "final": final_score(runs[rule])._asdict(),
            }
            for rule, codec in codecs.items()
        ],
        "from_8_bits": {names[rule]: _paired(runs[rule], runs[many])._asdict() for rule in few},
    }
    return Page(f"mf-ca2fl-{config.data}", codecs_markdown(content), content, partial(_draw_codecs, content))


def _paired(runs: Sequence[Outcome], others: Sequence[Outcome]) -> SeedStatistics:
    """Return the difference of the accuracies of two rules, seed by seed."""
    return seed_statistics([a.late_score() - b.late_score() for a, b in zip(runs, others, strict=True)])


def codecs_markdown(content: Mapping[str, Any]) -> str:
    """Return the page's table, with a line above and a line below."""
    cells = [
        [
            f"`{line['codec']}`" if number else "`float32` (CA2FL)",
            f"{line['row_bytes']:,}",
            percent(line["accuracy"]),
            percent(line["difference"], "+") if number else "",
            percent(line["final"]),
        ]
        for number, line in enumerate(content["codecs"])
    ]
    header = ("rows", "bytes per client", "accuracy, %", "difference from CA2FL", "after the last arrival, %")
    few = [f"`{codec}` {percent(value, '+')}" for codec, value in content["from_8_bits"].items()]
    return (
        f"{content['setting']}; {content['options']}; seeds {', '.join(map(str, content['seeds']))}. Accuracy: mean of "
        "the evaluations in the last quarter of a run. Mean and standard deviation over seeds; differences seed by "
        "seed, in points.\n\n"
        + markdown_table(header, cells)
        + f"\n2 bits minus 8 bits (`affine-8`), seed by seed, in points: {', '.join(few)}.\n"
    )


def _draw_codecs(content: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: accuracy against bits per element, a line for each kind of codec."""
    from matplotlib.figure import Figure

    from afflux.lab.results.figures import style_axes

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    exact = content["codecs"][0]["accuracy"]
    axes.axhline(100 * exact["mean"], color="#888888", linewidth=1, linestyle="--", label="CA2FL, float32 rows")
    low, high = 100 * (exact["mean"] - exact["std"]), 100 * (exact["mean"] + exact["std"])
    axes.axhspan(low, high, color="#888888", alpha=0.12, linewidth=0)
    for kind in ("affine", "affine-vector", "rotated"):
        lines = [line for line in content["codecs"] if line["codec"].rpartition("-")[0] == kind]
        axes.errorbar(
            [8 * line["row_bytes"] / content["parameters"] for line in lines],
            [100 * line["accuracy"]["mean"] for line in lines],
            yerr=[100 * line["accuracy"]["std"] for line in lines],
            **codec_style(kind),
            capsize=2,
            label=kind,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xlabel("bits per element of a client's row")
    axes.set_ylabel("test accuracy, % (bars: one standard deviation)")
    axes.legend(frameon=False)
    axes.set_title(content["setting"], fontsize=7)
    style_axes(axes)
    figure.savefig(path, dpi=150)


def codec_style(kind: str) -> dict[str, Any]:
    """Return marker and colour of a kind of codec."""
    colour = COLOURS[list(CODEC_MARKERS).index(kind) % len(COLOURS)]
    return {"marker": CODEC_MARKERS[kind], "color": colour.picture}


def percent(value: Mapping[str, float], sign: str = "") -> str:
    """Return mean and standard deviation in per cent."""
    return f"{100 * value['mean']:{sign}.1f} ± {100 * value['std']:.1f}"
