"""The benchmark's figures mean what they say: a quick run in a process of its own, and its refusals."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from oracle import EPS, U32

pytest.importorskip("rich")
pytest.importorskip("typer")
torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
D, M, REPEATS, THREADS = 100_003, 7, 3, 2


def bench(*arguments):
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "GITHUB_ACTIONS")}
    return subprocess.run(
        [sys.executable, "-m", "afflux", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env=env | {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run: what it printed, its JSON text, its Markdown."""
    folder = tmp_path_factory.mktemp("bench")
    files = folder / "out.json", folder / "out.md"
    done = bench("--quick", "-d", D, "-M", M, "--threads", THREADS, "--json", files[0], "--markdown", files[1])
    assert done.returncode == 0, done.stderr
    return done, *(file.read_text(encoding="utf-8") for file in files)


@pytest.fixture(scope="module")
def result(quick):
    return json.loads(quick[1])


@pytest.fixture(scope="module")
def two_more(tmp_path_factory):
    """A quick run of two other rows: what it printed, and its only case."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    done = bench("--quick", "--rows", "fadas,wkafl", "-d", D, "-M", M, "--threads", THREADS, "--json", path)
    assert done.returncode == 0, done.stderr
    (only,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return done.stdout, only


@pytest.fixture(scope="module")
def case(result):
    """The only case of a run with one d and M."""
    (only,) = result["cases"]
    return only


def everything(case):
    return [*case["probes"], *(c for row in case["rows"].values() for c in row)]


def test_settings_and_rows(result, case):
    settings = result["settings"]
    assert (settings["d"], settings["m"], settings["threads"], settings["repeats"]) == (D, M, THREADS, REPEATS)
    assert settings["sets"] >= 2
    assert (case["d"], case["m"], case["threads"]) == (D, M, THREADS)
    assert [row["name"] for row in result["rows"]] == list(case["rows"]) == ["fedbuff", "ca2fl"]
    for row in case["rows"].values():
        names = [c["name"] for c in row]
        assert names[0] == "afflux"
        assert len(set(names)) == len(names) >= 4
        (plain,) = [c for c in row if c["plain"]]
        for c in row:
            assert c["times_plain"] == pytest.approx(plain["median"] / c["median"])
    assert len(case["probes"]) >= 8


def test_bytes_are_the_definitions(case):
    f32, f64 = 4, 8
    fedbuff = f32 * (M * D + D + D)  # updates, params, out
    ca2fl = f32 * (M * D + M * D + M * D + D + D) + f64 * (D + D)  # updates, rows twice, params, out, sum twice
    for row, expected in zip(case["rows"].values(), (fedbuff, ca2fl), strict=True):
        assert {c["bytes"] for c in row} == {expected}
    probes = {p["name"]: p["bytes"] for p in case["probes"]}
    assert probes["afflux ingest"] == f32 * 2 * D
    assert probes["torch sum"] == f32 * M * D
    assert probes["torch mv"] == f32 * (M + 1) * D
    assert probes["numpy copyto"] == f32 * 2 * 4 * D


def test_figures_follow_from_the_samples(case):
    limit = case["limit"]["gbps"]
    for entry in everything(case):
        seconds = entry["seconds"]
        assert len(seconds) == REPEATS
        assert min(seconds) > 0
        assert (entry["min"], entry["max"]) == (min(seconds), max(seconds))
        assert entry["median"] == statistics.median(seconds)
        assert entry["gbps"] == pytest.approx(entry["bytes"] / entry["median"] / 1e9)
        assert entry["gbps"] <= limit
        assert entry["percent_of_limit"] == pytest.approx(100 * entry["gbps"] / limit)
    assert max(entry["gbps"] for entry in everything(case)) == limit
    assert max(case["limit"]["probes_by_kind"].values()) <= limit


def test_errors_are_within_their_bounds(case):
    """Ours is one rounding of a float64 sum; eager torch rounds each of at most M + 8 steps to float32.

    Each rounding is relative to a partial result, and no partial result exceeds the sum of all terms'
    magnitudes. M + 8: the sum, its division and scaling, the weights' own rounding, the last additions.
    """
    float64_sum = 2 * (M + 4) * EPS
    for row_name, row in case["rows"].items():
        outputs = {"params", "h", "rows"} if row_name == "ca2fl" else {"params"}
        for c in row:
            assert set(c["errors"]) == outputs
            ours = c["name"] == "afflux"
            for name, error in c["errors"].items():
                factor = (M + 8) * U32
                if ours:
                    factor = float64_sum + (U32 * (1 + 1e-6) if name == "params" else 0)
                if name == "rows":
                    factor = 0  # copied
                assert error["abs"] <= factor * error["terms"], (row_name, c["name"], name)
            assert c["errors"]["params"]["terms"] > 0.1  # the inputs were not zeros
            if ours:
                assert c["errors"]["params"]["ulp"] < 1
            else:
                assert c["errors"]["params"]["abs"] > 0


def test_parts_are_counted_as_parts(two_more):
    printed, case = two_more
    f32 = 4
    fadas = f32 * (M * D + D + D + 3 * 2 * D)  # updates, params, out, three moments twice
    gram = f32 * (M * D + D)  # gradients, the last estimate
    wkafl = 2 * gram + f32 * (D + D + D)  # params, out, the new estimate
    assert list(case["rows"]) == ["fadas", "wkafl"]
    for name, whole in (("fadas", fadas), ("wkafl", wkafl)):
        row = case["rows"][name]
        assert row[0]["name"] == "afflux"
        assert f"{name}, {whole / 1e9:.3g} GB" in printed
        assert [c["name"] for c in row if c["part"]] == (["afflux gram"] if name == "wkafl" else [])
        (plain,) = [c for c in row if c["plain"]]
        for c in row:
            assert c["name"] in printed
            assert c["bytes"] == (gram if c["part"] else whole)
            assert c["gbps"] == pytest.approx(c["bytes"] / c["median"] / 1e9)
            assert c["times_plain"] == (None if c["part"] else pytest.approx(plain["median"] / c["median"]))


def test_errors_of_fadas(two_more):
    """As above; beyond the sum, the two averages, root, quotient and last addition round less than twelve times."""
    row = two_more[1]["rows"]["fadas"]
    assert len(row) >= 4
    for c in row:
        assert set(c["errors"]) == {"params", "m", "v", "v_hat"}
        ours = c["name"] == "afflux"
        for name, error in c["errors"].items():
            factor = U32 * (1 + 1e-6) if ours else (M + 20) * U32
            assert 0 < error["abs"] <= factor * error["terms"], (c["name"], name)
            assert not ours or error["ulp"] < 0.51


def test_errors_of_wkafl(two_more):
    """A cosine of float32 sums over d is wrong by their rounding errors, which nearly cancel: 4 sqrt(d) of them.

    The weights are exp(beta cos) over their sum, beta = 10; the params move with them along gradients below 0.1.
    """
    row = {c["name"]: c["errors"] for c in two_more[1]["rows"]["wkafl"]}
    gram = row.pop("afflux gram")["gram"]
    assert gram["abs"] <= D * EPS * gram["terms"]
    assert len(row) >= 3
    for name, errors in row.items():
        params, estimate, weights = (errors[what] for what in ("params", "estimate", "weights"))
        ours = name == "afflux"
        unit = U32 * (1 + 1e-6) if ours else (M + 8) * U32
        cosine = D * EPS if ours else 4 * D**0.5 * U32
        assert 0 < estimate["abs"] <= unit * estimate["terms"], name
        assert 0 < weights["abs"] <= 2 * 10 * cosine * weights["terms"], name
        assert 0 < params["abs"] <= unit * params["terms"] + M * 0.1 * weights["abs"], name
        assert weights["terms"] > 1 / M
        assert not ours or max(params["ulp"], estimate["ulp"]) < 0.51


def test_says_where_it_ran_and_not_who(quick, result):
    assert set(result["machine"]) == {
        "cpu",
        "cores",
        "usable_cores",
        "caches",
        "memory",
        "huge_pages",
        "system",
        "load_at_start",
    }
    software = result["software"]
    assert software["torch"] == torch.__version__
    assert software["python"] == sys.version.split()[0]
    assert software["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", software["commit"])
    for text in quick[1:]:
        assert str(ROOT) not in text
        assert str(Path.home()) not in text or Path.home() == Path("/")


def test_prints_and_writes_tables(quick):
    done, _, markdown = quick
    for text in (done.stdout, markdown):
        assert "Limit of this run" in text
        assert "not memory speed" in text  # 100,003 elements lie in the cache
        for name in ("afflux", "torch addmv_", "torch mul_", "% of limit"):
            assert name in text
    for line in markdown.splitlines():
        if line.startswith("|---"):
            columns = line.count("|")
        elif line.startswith("|") and not line.startswith("|  |"):
            assert line.count("|") == columns
    assert "\r" not in done.stderr
    assert "timing" not in done.stderr  # progress is for terminals


def test_rounds_over_m(tmp_path):
    d, path = 3_001, tmp_path / "out.json"
    done = bench("--quick", "--rows", "rounds", "-d", d, "--threads", THREADS, "--json", path)
    assert done.returncode == 0, done.stderr
    assert "vs M = 10" in done.stdout
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert [(case["d"], case["m"], case["threads"]) for case in cases] == [(d, m, THREADS) for m in (1, 10, 100, 1000)]
    at_10 = {c["name"]: c["percent_of_limit"] for c in cases[1]["rows"]["rounds"]}
    assert next(iter(at_10)) == "afflux"
    assert {"torch stack().mean", "torch addmv_"} < set(at_10)
    for case in cases:
        assert case["separate"]
        assert max(entry["gbps"] for entry in everything(case)) == case["limit"]["gbps"]
        for c in case["rows"]["rounds"]:
            assert c["bytes"] == 4 * d * (case["m"] + 2)
            assert c["times_m10"] == pytest.approx(c["percent_of_limit"] / at_10[c["name"]])
            error = c["errors"]["params"]
            assert error["abs"] <= (case["m"] + 8) * U32 * error["terms"]
            if c["name"].startswith("afflux"):
                assert error["ulp"] < 1


def test_a_push_and_sizes_of_ones_own(tmp_path):
    d, m, path = 999, 6, tmp_path / "out.json"
    done = bench("--quick", "--rows", "push,rounds", "-d", d, "-M", m, "--threads", THREADS, "--json", path)
    assert done.returncode == 0, done.stderr
    pushes, rounds = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert [(c["d"], c["m"], c["threads"]) for c in (pushes, rounds)] == [(d, m, 1), (d, m, THREADS)]
    assert {c["times_m10"] for c in rounds["rows"]["rounds"]} == {None}  # M = 10 was not timed
    (plain,) = [c for c in pushes["rows"]["push"] if c["plain"]]
    assert plain["name"] == "numpy copyto"
    for c in pushes["rows"]["push"]:
        assert c["bytes"] == 8 * d * m
        assert c["us"] == pytest.approx(1e6 * c["median"] / m)
        assert c["times_copy"] == pytest.approx(c["us"] / plain["us"])
        assert c["us_over"] == pytest.approx(c["us"] - 1.5 * plain["us"])
        assert re.fullmatch(r"L\d.?|memory|cache and memory", c["lies_in"])
        outputs = {"slots"} if c["name"] != "afflux" else set()
        outputs |= {"norms"} if "copy" not in c["name"] else set()
        assert set(c["errors"]) == outputs
        assert c["errors"].get("slots", {"abs": 0})["abs"] == 0
        if norms := c["errors"].get("norms"):
            unit = EPS if c["name"].startswith("afflux") else U32
            assert norms["abs"] <= d * unit * norms["terms"]
            assert norms["terms"] > 0.1


def test_streaming_beside_buffers(tmp_path):
    d, m, path = 3_001, 6, tmp_path / "out.json"
    done = bench("--quick", "--rows", "streaming", "-d", d, "-M", m, "--threads", THREADS, "--json", path)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    lines = {c["name"]: c for c in case["rows"]["streaming"]}
    assert (lines["afflux"]["held"], lines["afflux, buffered"]["held"]) == (16 * d, 4 * d * (m + 1))
    for name, c in lines.items():
        assert c["bytes"] == 4 * d * (m + 2)
        assert c["us"] == pytest.approx(1e6 * c["median"] / m)
        error = c["errors"]["params"]
        assert error["abs"] <= (m + 8) * U32 * error["terms"]
        if name.startswith("afflux"):
            assert error["ulp"] < 1


@pytest.mark.parametrize("arguments", [("--rows", "fedbuff,fedbuf"), ("--rows", "")])
def test_unknown_row(arguments):
    done = bench(*arguments)
    assert done.returncode == 2
    assert "known rows: fedbuff, ca2fl" in done.stderr
    assert ("unknown: fedbuf;" in done.stderr) == (arguments[1] != "")


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="available memory is unknown here")
def test_refuses_what_does_not_fit():
    done = bench("-d", 10**13)
    assert done.returncode == 2
    assert "GB of memory" in done.stderr
    assert "would fit" in done.stderr


def test_refuses_a_folder_that_is_not_there(tmp_path):
    done = bench("--quick", "--json", tmp_path / "none" / "out.json")
    assert done.returncode == 2
    assert "no folder" in done.stderr


@pytest.mark.parametrize("option", ["--list", "--help"])
def test_lists_and_helps(option):
    done = bench(option)
    assert done.returncode == 0
    assert "fedbuff" in done.stdout
    assert "push" in done.stdout
    listed = {"torch addmv_", "fadas", "torch fused Adam", "wkafl", "afflux gram"}
    assert all(name in done.stdout for name in (listed if option == "--list" else {"afflux bench --quick"}))


def test_tiny_vectors():
    done = bench("--quick", "-d", 1, "-M", 1, "--rows", "ca2fl,fadas,wkafl")
    assert done.returncode == 0, done.stderr
    assert "fedbuff" not in done.stdout
