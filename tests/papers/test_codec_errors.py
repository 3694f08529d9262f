"""`bench.papers codecs`: errors and means by their formulas, with the reference's rows; what it reads and writes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import rows
from afflux.ops import codecs
from afflux.sim.workload.config import SimConfig
from bench.papers import codec_errors, table_pages
from bench.papers.command import app
from conftest import ROOT, check_refused
from test_codecs import ERRORS

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=150)
ALL = [codecs.Codec(name) for name in codecs.Name.__args__]


def test_every_codec_that_rounds_is_measured():
    assert list(codec_errors.CODECS) == [codec for codec in ALL if not codec.exact]


@pytest.mark.parametrize("codec", codec_errors.CODECS, ids=repr)
def test_errors_are_their_formulas(rng, codec):
    vectors = rng.standard_normal((7, 300)).astype(np.float32)
    back = []
    for number, x in enumerate(vectors):
        facts = rows.row_key(3, 1, number), float(x.min()), float(x.max())
        back.append(rows.decode(codec.name, rows.encode(codec.name, x, *facts), 300))
    off = np.array(back, float) - vectors
    squares = (off**2).sum(axis=1)
    error = np.mean(squares / (vectors.astype(float) ** 2).sum(axis=1))
    mean = 7 * (off.mean(axis=0) ** 2).sum() / squares.mean()
    assert codec_errors.measure_error(codec, vectors, 3) == pytest.approx((error, mean), rel=1e-12)


def test_the_mean_of_one_vector_falls_or_does_not():
    """1 for an unbiased codec: 200 elements and 100 rows, 1 +- sqrt(2/200); 100 where nothing is random."""
    kinds = {"normal": np.random.default_rng(5).standard_normal((3, 200)).astype(np.float32)}
    falls = {
        codec: codec_errors.measure_codec(codec, kinds, 0)["mean"]["normal, one vector"]
        for codec in codec_errors.CODECS
    }
    assert falls[codecs.float16] == pytest.approx(100)
    assert falls[codecs.affine(4)] == pytest.approx(1, abs=0.5)
    assert codec_errors.measure_codec(codecs.affine(4), kinds, 0)["bits"] == pytest.approx(4.5, abs=1e-3)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(codec_errors, "SIZE", 600)
    monkeypatch.setitem(codec_errors.RUNS, "mine", SMALL)
    monkeypatch.setattr(codec_errors, "CODECS", (codecs.bfloat16, codecs.affine(8), codecs.rotated(1)))


def test_from_the_command_line(small, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    arguments = ["codecs", "--updates", "mine", "--seed", "3", "--out"]
    results = [CliRunner().invoke(app, [*arguments, str(folder)]) for folder in (out, again)]
    assert [result.exit_code for result in results] == [0, 0], results[0].output
    assert sorted(path.name for path in out.iterdir()) == ["codecs.json", "codecs.md", "codecs.png", "command.json"]
    assert (out / "codecs.json").read_bytes() == (again / "codecs.json").read_bytes()
    content = json.loads((out / "codecs.json").read_text())
    assert codec_errors.page_markdown(content) == (out / "codecs.md").read_text()
    assert (out / "codecs.md").read_text() in results[0].stdout
    assert content["vectors"]["mine"] == [100, 650]
    kinds = ["normal", "Laplace", "sparse", "mine"]
    for line in content["codecs"]:
        assert list(line["error"]) == kinds
        assert list(line["mean"]) == [*(f"{kind}, one vector" for kind in kinds[:3]), "mine", "mine, one vector"]
    assert "| codec | bits per element | normal | Laplace | sparse | mine |" in results[0].stdout


def test_what_is_kept_exactly_has_no_error():
    assert codec_errors.measure_error(codecs.affine(1), [np.ones(256, np.float32)] * 3, 0) == (0, 0)


def test_updates_are_taken_evenly_over_the_run(monkeypatch):
    assert codec_errors.updates_of_run(SMALL).shape == (100, 650)
    every = codec_errors.updates_of_run(replace(SMALL, arrivals=100))
    monkeypatch.setattr(codec_errors, "ROWS", 10)
    assert (codec_errors.updates_of_run(replace(SMALL, arrivals=100)) == every[::11]).all()


def test_updates_of_another_run():
    check_refused("unknown updates 'images'; known: digits, mnist", codec_errors.make_page, ["images"])


# ---- the page ------------------------------------------------------------------------------------------------------

DOCS = ROOT / "docs"
RUN_ON = ("digits", "mnist")


def results(name):
    return json.loads((DOCS / "results" / name).read_text())


def test_the_pages_are_those_of_the_results():
    pages = {"codecs": codec_errors.page_markdown(results("codecs.json"))}
    pages |= {f"mf-ca2fl-{data}": table_pages.codecs_markdown(results(f"mf-ca2fl-{data}.json")) for data in RUN_ON}
    folder = DOCS / "results"
    assert [name for name, text in pages.items() if text != (folder / f"{name}.md").read_text()] == []


def test_the_errors_of_the_page_are_those_that_were_asked_for():
    """Gaussian vectors: the ranges of test_codecs.py; a mean of affine rows falls as 1/100, within 6 per cent."""
    for line in results("codecs.json")["codecs"]:
        low, high = ERRORS[line["codec"]]
        assert low < line["error"]["normal"] < high
        if "affine" in line["codec"]:
            assert all(abs(mean - 1) < 0.06 for mean in line["mean"].values())


@pytest.mark.parametrize("data", RUN_ON)
def test_two_bits_are_as_accurate_as_eight(data):
    """As stated on the page: the mean of the differences over seeds is within a point."""
    content = results(f"mf-ca2fl-{data}.json")
    assert len(content["seeds"]) >= 3
    for codec in ("affine-2", "rotated-2"):
        assert abs(content["from_8_bits"][codec]["mean"]) < 0.01
