"""The errors of each codec's rows, on random vectors and on the updates of a run.

error     E|Q(x) - x|^2 / |x|^2
mean      N |mean_i (Q_i(x_i) - x_i)|^2 / mean_i |Q_i(x_i) - x_i|^2 over N = 100 rows: 1 where errors are unbiased and
          independent, so that the mean's squared error is 1/100 of a row's; 100 where it does not fall at all. Measured
          with one vector x in all rows (keys differ), the hardest case, and with the updates of a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from afflux import __version__, ops
from afflux.aggregation.cache.table import row_key
from afflux.lab.publishing import Page, markdown_table
from afflux.lab.runs.setup import RunSetup
from afflux.ops import codecs
from afflux.ops.codecs import Codec
from afflux.ops.validation import known
from afflux.rules.specs import parse_rule
from afflux.sim.clients.flat_model import reproducible_libraries
from afflux.sim.clients.training import SerialTraining
from afflux.sim.errors import require
from afflux.sim.loop import PushedUpdate
from afflux.sim.workload.config import SimConfig
from bench.papers.table_pages import CODEC_MARKERS, codec_style

SIZE, DRAWS, ROWS = 200_000, 5, 100
CODECS = codecs.ROUNDING
SAME = "{}, one vector"
#: The runs whose updates are measured, by name: the demo's CNN and WKAFL's, and their rule.
RUNS = {"digits": SimConfig(), "mnist": SimConfig(data="mnist", model="wkafl-cnn", arrivals=200)}
RULE = "ca2fl:server_lr=0.6"


def random_vectors(seed: int) -> dict[str, np.ndarray]:
    """Return vectors (DRAWS, SIZE) float32 by law: normal, Laplace, and normal with about 1 % of elements not 0."""
    rng = np.random.Generator(np.random.PCG64(seed))
    shape = (DRAWS, SIZE)
    vectors = {
        "normal": rng.standard_normal(shape),
        "Laplace": rng.laplace(size=shape),
        "sparse": rng.standard_normal(shape) * (rng.random(shape) < 0.01),
    }
    return {name: vector.astype(np.float32) for name, vector in vectors.items()}


def updates_of_run(config: SimConfig) -> np.ndarray:
    """Return ROWS updates (ROWS, d) float32 of a run of CA2FL, evenly over its arrivals.

    Raises:
        ConfigError: the data are missing.
    """
    numbers = set(np.linspace(0, config.arrivals - 1, ROWS).astype(int).tolist())
    with reproducible_libraries():
        setup, rule = RunSetup(config, 0), parse_rule(RULE)
        loop = setup.loop(rule, [setup.new_server(rule)], SerialTraining(setup.trainer, 0))
        pushed = (event for event in loop if isinstance(event, PushedUpdate))
        return np.array([event.trained.update for event in pushed if event.number in numbers])


def encode_and_decode(codec: Codec, vectors: Sequence[np.ndarray], seed: int) -> Iterator[np.ndarray]:
    """Yield each vector (d,) float32 after encoding, with its own key, and decoding; all in the same buffer."""
    size = vectors[0].size
    row = np.empty(codec.row_size(size), codec.row_dtype)
    out = np.empty(size, np.float32)
    for number, x in enumerate(vectors):
        facts = ops.RowFacts(row_key(seed, 1, number), float(x.min()), float(x.max()))
        ops.encode(x, row, codec=codec, facts=facts)
        ops.decode(row, out, codec=codec)
        yield out


def measure_error(codec: Codec, vectors: Sequence[np.ndarray], seed: int) -> tuple[float, float]:
    """Return the module's `error`, the mean over the vectors, and its `mean` with N the number of vectors."""
    off, total = np.empty(vectors[0].size), np.zeros(vectors[0].size)
    squares, relative = 0.0, 0.0
    for x, back in zip(vectors, encode_and_decode(codec, vectors, seed), strict=True):
        length = float(np.square(x, out=off, dtype=np.float64).sum())
        np.subtract(back, x, out=off, dtype=np.float64)
        square = float(off @ off)
        squares += square
        relative += square / length
        total += off
    count = len(vectors)
    return relative / count, float(total @ total) / squares if squares else 0.0


def measure_codec(codec: Codec, kinds: Mapping[str, np.ndarray], seed: int) -> dict[str, Any]:
    """Measure one codec on vectors (n, d) of all kinds.

    Returns:
        codec; bits, per element of a long vector, with scales; error and mean, those of the module by the name of the
        vectors. "one vector" in the name: all rows are of one vector.
    """
    errors, means = {}, {}
    for name, vectors in kinds.items():
        errors[name], mean_error = measure_error(codec, list(vectors), seed)
        if len(vectors) == ROWS:
            means[name] = mean_error
        means[SAME.format(name)] = measure_error(codec, [vectors[len(vectors) // 2]] * ROWS, seed)[1]
    return {"codec": codec.name, "bits": 8 * codec.row_bytes(2**20) / 2**20, "error": errors, "mean": means}


def make_page(updates: Sequence[str] = (), seed: int = 0, data_dir: str | None = None) -> Page:
    """Measure all codecs on drawn vectors and on the updates of some of RUNS; raise ConfigError for another name."""
    require("matplotlib")
    for name in updates:
        known("updates", name, RUNS)
    kinds = random_vectors(seed) | {name: updates_of_run(replace(RUNS[name], data_dir=data_dir)) for name in updates}
    content = {
        "source": __doc__,
        "afflux": __version__,
        "seed": seed,
        "vectors": {name: list(vectors.shape) for name, vectors in kinds.items()},
        "codecs": [measure_codec(codec, kinds, seed) for codec in CODECS],
    }
    return Page("codecs", page_markdown(content), content, partial(_draw, content))


def page_markdown(content: Mapping[str, Any]) -> str:
    """Return the page's two tables."""
    tables = []
    for field in ("error", "mean"):
        names = list(content["codecs"][0][field])
        cells = [
            [f"`{x['codec']}`", f"{x['bits']:.3g}", *(two_digits(x[field][name]) for name in names)]
            for x in content["codecs"]
        ]
        tables.append(markdown_table(("codec", "bits per element", *names), cells))
    return (
        f"E|Q(x) - x|^2 / |x|^2:\n\n{tables[0]}\nThe squared error of the mean of {ROWS} rows, times {ROWS}, over that "
        f"of one row (1: it falls as 1/{ROWS}; {ROWS}: it does not fall):\n\n{tables[1]}"
    )


def two_digits(value: float) -> str:
    """Return a number with two significant digits.

    >>> two_digits(0.00021), two_digits(1345.6), two_digits(3.4e-06)
    ('0.00021', '1300', '3.4e-06')
    """
    return f"{float(f'{value:.2g}'):g}"


def _draw(content: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: a panel for each kind of vectors, errors over bits, a line for each kind of codec."""
    from matplotlib.figure import Figure

    from afflux.lab.results.figures import style_axes

    names, table = list(content["vectors"]), content["codecs"]
    figure = Figure(figsize=(1 + 2.6 * len(names), 3.8), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        for kind in CODEC_MARKERS:
            rows = [x for x in table if codecs.named(x["codec"]).coding == kind]
            bits, errors = [x["bits"] for x in rows], [x["error"][name] for x in rows]
            axes.loglog(bits, errors, **codec_style(kind), label=kind)
        axes.axhline(1, color="#888888", linewidth=0.8, linestyle=":")
        axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axes.set_xlabel("bits per element")
        axes.set_title(name, fontsize=10)
        style_axes(axes)
        axes.minorticks_off()
    panels[0].set_ylabel("E|Q(x) - x|$^2$ / |x|$^2$")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CODEC_MARKERS), frameon=False
    )
    figure.savefig(path, dpi=150)
