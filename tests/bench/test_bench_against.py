"""Two builds timed by turns: each runs in a process of its own, and the figures follow from the samples."""

import json
import shutil
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from afflux import _engine, ops
from bench import against, builds
from bench.__main__ import app
from bench.measure.timing import Timed, measure_groups
from bench.rows.fedbuff import FEDBUFF
from bench.rows.server.streaming import STREAMING
from benching import THREADS, D, M, bench, cache  # noqa: F401
from conftest import ROOT, check_error
from pairwise import soak

pytest.importorskip("torch")

ENGINE = Path(_engine.__file__)
REPEATS = 6  # so many that the median's interval exists


@pytest.fixture
def checkout(tmp_path):
    """A copy of this build, as an older checkout has it."""
    package = tmp_path / "old" / "python" / "afflux"
    ignored = shutil.ignore_patterns("__pycache__", "_engine.*")
    shutil.copytree(ENGINE.parent, package, ignore=ignored)
    shutil.copy(ENGINE, package)
    shutil.copytree(ROOT / "bench", tmp_path / "old" / "bench", ignore=shutil.ignore_patterns("__pycache__", "results"))
    (tmp_path / "old" / "tests").symlink_to(ROOT / "tests")
    return tmp_path / "old"


def change(file, old, new):
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def compared(tmp_path, *arguments):
    """What `--against` printed, and its JSON."""
    out = tmp_path / "out"
    done = bench("--quick", "-d", D, "-M", M, "--threads", THREADS, "--repeats", REPEATS, "--out", out, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout + (out / "bench.md").read_text(encoding="utf-8"), json.loads((out / "bench.json").read_text())


def test_finds_a_build(checkout, tmp_path):
    package = checkout / "python" / "afflux"
    engine = package / ENGINE.name
    for path in (checkout, checkout / "python", package, engine):
        assert builds.find(path) == builds.Build(engine, package)
        assert builds.find(path).root == checkout
    alone = shutil.copy(ENGINE, tmp_path)
    assert builds.find(Path(alone)) == builds.find(tmp_path) == builds.Build(tmp_path / ENGINE.name, builds.OWN_PACKAGE)
    assert builds.find(Path(alone)).root == builds.OWN.root == ROOT
    with pytest.raises(builds.NoBuild, match="no built extension"):
        builds.find(tmp_path / "old" / "python" / "afflux" / "rules")


def test_a_build_that_cannot_be_loaded_says_why(checkout):
    with (checkout / "python" / "afflux" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\nfrom afflux import no_codecs\n")
    check_error("no_codecs", builds.BuildProcess, builds.find(checkout), None, error=builds.NoBuild)


def test_a_process_that_ends_is_an_error(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "worker.py").write_text("raise SystemExit(3)")
    with pytest.raises(builds.NoBuild, match="its process ended with status 3"):
        builds.BuildProcess(builds.Build(ENGINE, tmp_path / "python" / "afflux"), None)


@pytest.mark.parametrize("rows", ["gram,fedbuff-bf16,push,streaming", *soak("wkafl,mf-ca2fl-rotated-2")])
def test_a_copy_has_the_same_bits(rows, checkout, tmp_path):
    printed, out = compared(tmp_path, "--rows", rows, "--against", checkout)
    assert "Both builds wrote the same bits in all rows." in printed
    assert "called by its own Python package" in printed
    assert printed.count("its figures say nothing about speed") == 2, "on the terminal and in the file"
    names = {pair["name"] for pair in out["pairs"]}
    assert {f"{name}: afflux" for name in rows.split(",")} < names
    for pair in out["pairs"]:
        assert pair["same_bits"]
        assert pair["errors"]["old"] == pair["errors"]["new"]
        ratio = pair["ratio"]
        low, high = ratio["interval"]["low"], ratio["interval"]["high"]
        assert ratio["min"] <= low <= ratio["median"] <= high <= ratio["max"]
        assert ratio["lower_quartile"] <= ratio["median"] <= ratio["upper_quartile"]
        assert ratio["samples"] == pair["old"]["samples"] == pair["new"]["samples"] == REPEATS
        assert pair["verdict"] == ("faster" if high < 1 else "slower" if low > 1 else "alike")
        assert ratio["of_minima"] == pair["new"]["min"] / pair["old"]["min"]


def test_other_bits_and_another_speed_are_seen(checkout, tmp_path):
    change(checkout / "bench" / "spec" / "inputs.py", "LR = 0.7", "LR = 0.6")
    change(
        checkout / "python" / "afflux" / Path(sys.modules[ops.gram.__module__].__file__).relative_to(ENGINE.parent),
        "    _engine.gram(",
        "    import time; time.sleep(0.05)\n    _engine.gram(",
    )
    printed, out = compared(tmp_path, "--rows", "gram,fedbuff", "--against", checkout)
    assert "DIFFERENT BITS: fedbuff: afflux" in printed
    gram, fedbuff = out["pairs"]
    assert gram["same_bits"]
    assert not fedbuff["same_bits"]
    assert gram["old"]["min"] > 0.05
    assert gram["verdict"] == "faster"
    assert gram["ratio"]["median"] < 1


def test_an_extension_alone_is_called_by_this_package(tmp_path):
    shutil.copy(ENGINE.parent / "libafflux.so", tmp_path)
    printed, out = compared(tmp_path, "--rows", "fedbuff,peers-native", "--against", shutil.copy(ENGINE, tmp_path))
    assert "called by this build's Python package" in printed
    assert "same bits" in printed
    assert out["pairs"][0]["name"] == "fedbuff: afflux"
    assert out["old"]["instruction_set"] == out["software"]["instruction_set"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", Path(__file__).parent], "no built extension"),
        (["--against", ENGINE, "--compile"], "does not go with --compile"),
        (["--against", ENGINE, "--picture", "x.png"], "does not go with --picture"),
        (["--against", ENGINE, "--rows", "fedbuf"], "unknown: fedbuf"),
    ],
)
def test_refusals(arguments, message):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])
    assert done.exit_code == 2
    assert message in done.output


def test_pairs_are_ours_that_both_builds_have():
    old = SimpleNamespace(description={"contenders": {"streaming": ["afflux", "afflux, earlier"]}})
    assert against.names_of(STREAMING, old) == ["afflux"]
    assert against.names_of(FEDBUFF, old) == []


@pytest.mark.parametrize(("count", "ranks"), [(5, None), (6, (1, 6)), (9, (2, 8)), (20, (6, 15)), (30, (10, 21))])
def test_the_interval_of_a_median(count, ranks):
    """The ranks of tables of the sign test."""
    values = np.random.default_rng(count).permutation(np.arange(1.0, count + 1))
    assert against.interval_of_median(values.tolist()) == ranks
    assert against.verdict(ranks) == ("slower" if ranks and ranks[0] > 1 else "alike" if ranks else "")
    if ranks:
        assert against.verdict(tuple(rank / count - 0.9 for rank in ranks)) == "faster"


def test_pairs_meet_each_input_set_in_both_orders():
    calls = []

    def timed(name):
        return Timed(name, "", 1, lambda number: calls.append((name, number)), rest=0)

    groups = [[timed("a"), timed("b")], [timed("c"), timed("d")]]
    measure_groups(groups, 4)
    for first, second in (("a", "b"), ("c", "d")):
        own = [call for call in calls if call[0] in (first, second)]
        expected = [(first, 0), (second, 0), (first, 1), (second, 1), (second, 2), (first, 2), (second, 3), (first, 3)]
        assert own == expected
        assert all(abs(calls.index((first, k)) - calls.index((second, k))) == 1 for k in range(4))
    assert all(len(timed.seconds) == 4 for group in groups for timed in group)
    assert statistics.median(groups[0][0].seconds) == groups[0][0].median
