"""The benchmark's figures are correct: quick runs."""

import gzip
import json
import re
import statistics
import sys
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.output import tables
from bench.output.report import to_json, without_samples
from bench.rows import ROWS
from bench.spec.streams import moved
from benching import THREADS, D, M, bench_process, cache, quick_cases  # noqa: F401
from conftest import ROOT
from oracle import EPS, U32

REPEATS = 3


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run: what it printed, its JSON text, its Markdown, and the JSON with every sample."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    samples = folder.with_name("samples.json.gz")
    sizes = ("-d", D, "-M", M, "--threads", THREADS)
    done = bench_process("--quick", "--rows", "fedbuff,ca2fl", *sizes, "--out", folder, "--samples", samples)
    assert done.returncode == 0, done.stderr
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("bench.json", "bench.md")]
    return done, *texts, gzip.decompress(samples.read_bytes()).decode()


@pytest.fixture(scope="module")
def result(quick):
    return json.loads(quick[1])


@pytest.fixture(scope="module")
def two_more(tmp_path_factory):
    """A quick run of two other rows: what it printed, and its only case."""
    printed, (only,) = quick_cases(tmp_path_factory.mktemp("bench"), "fadas,wkafl", "-d", D, "-M", M)
    return printed, only


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
        (plain,) = [c for c in row if c["role"] == "plain"]
        best = min(c["median"] for c in row if c["role"] == "best")
        for c in row:
            assert c["times_plain"] == pytest.approx(plain["median"] / c["median"])
            assert c["times_best"] == pytest.approx(best / c["median"])
            assert c["times_ours"] == pytest.approx(c["median"] / row[0]["median"])
    assert len(case["probes"]) >= 8


def test_bytes_are_the_definitions(case):
    f32, f64 = 4, 8
    fedbuff = f32 * (M * D + D + D)  # updates, params, out
    ca2fl = f32 * (M * D + M * D + M * D + D + D) + f64 * (D + D)  # updates, rows twice, params, out, sum twice
    for row, expected in zip(case["rows"].values(), (fedbuff, ca2fl), strict=True):
        assert {c["bytes"] for c in row} == {expected}
    probes = {p["name"]: p["bytes"] for p in case["probes"]}
    assert probes["torch sum"] == f32 * M * D
    assert probes["torch mv"] == f32 * (M + 1) * D
    assert probes["torch copy_"] == f32 * 2 * 4 * D
    assert probes["native: 3 in place"] == f32 * 3 * 2 * D
    assert probes[f"native: {M + 1} read, 1 written"] == fedbuff
    assert probes[f"native: {M + 1} read, 1 written, {M} + 1 of 8 bytes in place"] == ca2fl


@pytest.mark.parametrize(
    ("row", "an_element"),
    [
        ("ingest", 4 * (1 + 1)),
        ("gram", 4 * M),
        ("fedbuff", 4 * (M + 2)),
        ("fedbuff-bf16", 2 * M + 4 * 2),
        ("ca2fl", 4 * (3 * M + 2) + 8 * 2),
        ("fadas", 4 * (M + 2) + 4 * 3 * 2),
        ("wkafl", 4 * (M + 1) + 4 * (M + 4)),
        ("push", 4 * M * 2),
        ("scaling-n", 4 * M * 2 + 4 * (3 * M + 2) + 8 * 2),
        ("mf-ca2fl-affine-4", 4 * (M + 2) + M * (1 / 2 + 8 / 128) * 2 + 8 * 2),
        ("mf-ca2fl-rotated-2", 4 * (M + 2) + M * (1 / 4 + 4 / 128) * 2 + 8 * 2),
    ],
)
def test_bytes_follow_from_the_streams(row, an_element):
    m = 1 if row == "ingest" else M
    assert moved(next(r for r in ROWS if r.name == row).traffic(m), D) == ceil(D * an_element)


def test_figures_follow_from_the_samples(quick, result, case):
    with_samples = json.loads(quick[3])
    assert without_samples(with_samples) == result
    assert '"seconds"' not in quick[1]
    (full,) = with_samples["cases"]
    for entry, sampled in zip(everything(case), everything(full), strict=True):
        seconds = sampled["seconds"]
        assert entry["samples"] == len(seconds) == REPEATS
        assert min(seconds) > 0
        assert (entry["min"], entry["max"]) == (min(seconds), max(seconds))
        assert entry["median"] == statistics.median(seconds)
        quartiles = np.quantile(seconds, (0.25, 0.75)).tolist()
        assert [entry["lower_quartile"], entry["upper_quartile"]] == pytest.approx(quartiles)
        assert entry["gbps"] == pytest.approx(entry["bytes"] / entry["median"] / 1e9)


def test_json_has_a_line_for_each_contender(result, quick):
    assert json.loads(to_json(result)) == result
    assert to_json(result) == quick[1]
    lines = quick[1].splitlines()
    assert all(sum(json.dumps(entry) in line for line in lines) == 1 for entry in everything(result["cases"][0]))
    assert to_json({"a": [], "b": {"c": [1, {}]}, "d": {"e": None}}).splitlines() == [
        *("{", ' "a": [', " ],", ' "b": {', '  "c": [', "   1,", "   {}", "  ]", " },", ' "d": {"e": null}', "}")
    ]


def test_a_limit_is_the_best_of_what_is_comparable(case):
    mixes = {"fedbuff": f"{M + 1} read, 1 written", "ca2fl": f"{M + 1} read, 1 written, {M} + 1 of 8 bytes in place"}
    for name, row in case["rows"].items():
        able = [*row, *(p for p in case["probes"] if p["kind"] == "read" or p["what"] == mixes[name])]
        limit = case["limits"][name]
        assert limit["gbps"] == max(entry["gbps"] for entry in able)
        assert limit["by"] in {entry["name"] for entry in able if entry["gbps"] == limit["gbps"]}
        for c in row:
            assert c["percent_of_limit"] == pytest.approx(100 * c["gbps"] / limit["gbps"])
            assert c["limit"] == limit["gbps"]
    for kind, gbps in case["best"].items():
        assert gbps == max(p["gbps"] for p in case["probes"] if p["kind"] == kind)


def test_where_we_lose_is_what_the_samples_say(result, case):
    faster = {
        (name, c["name"]): row[0]["median"] / c["median"]
        for name, row in case["rows"].items()
        for c in row
        if c["median"] < 0.99 * row[0]["median"]
    }
    said = {(loss["row"], loss["name"]): loss["times"] for loss in result["where_we_lose"]}
    assert said == {who: [pytest.approx(times)] for who, times in faster.items()}


def test_who_is_faster_is_said_with_where_and_why():
    loss = {"row": "push", "name": "torch", "caveat": "only copies", "times": [3.0, 1.5]}
    at = [{"d": d, "m": 5, "clients": None} for d in (1000, 10)]
    assert tables.sentence(loss | {"at": at}) == "push: torch 1.50x to 3.00x faster, d = 10, 1_000 (only copies)"
    assert tables.sentence(loss | {"at": at[:1], "times": [2.0], "caveat": ""}) == "push: torch 2.00x faster"


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
        assert f"{name}: d = {D:_}, M = {M}, float32, {THREADS} threads" in printed
        assert f"{whole / 1e6:.4g} MB" in printed
        assert [c["name"] for c in row if c["part"]] == (["afflux inner"] if name == "wkafl" else [])
        (plain,) = [c for c in row if c["role"] == "plain"]
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
    found = row.pop("afflux inner")["inner"]
    assert found["abs"] <= D * EPS * found["terms"]
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
    facts = "cpu family cores usable_cores caches memory huge_pages system load_at_start"
    assert set(result["machine"]) == set(facts.split())
    software = result["software"]
    assert software["torch"] == torch.__version__
    assert software["python"] == sys.version.split()[0]
    assert software["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", software["commit"])
    for text in quick[1:]:
        assert str(ROOT) not in text
        assert str(Path.home()) not in text or Path.home() == Path("/")


def test_prints_and_writes_tables(quick):
    done, _, markdown, _ = quick
    for text in (done.stdout, markdown):
        assert "Operations" in text
        assert "Limits, and the machine's best" in text
        assert "Where we lose" in text
        assert "its figures say nothing about speed" in " ".join(text.split())
        assert "not memory speed" in text  # 100,003 elements lie in the cache
        for name in ("afflux", "torch addmv_", "torch mul_", "native: 1 read", "% of limit"):
            assert name in text
    for line in markdown.splitlines():
        if line.startswith("| ---"):
            columns = line.count("|")
        elif line.startswith("|") and line.split("|")[1].strip():
            assert line.count("|") == columns
    assert "\r" not in done.stderr
    assert "timing" not in done.stderr  # progress is for terminals
