"""The benchmark's figures mean what they say: a quick run in a process of its own, and its refusals."""

import json
import os
import re
import statistics
import subprocess
import sys
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from afflux import ops
from oracle import EPS, U32

pytest.importorskip("rich")
pytest.importorskip("typer")
torch = pytest.importorskip("torch")

from afflux.bench import native, tables  # noqa: E402
from afflux.bench.native import Variant, sweep  # noqa: E402
from afflux.bench.neighbours import Neighbours  # noqa: E402
from afflux.bench.rows import ROWS  # noqa: E402
from afflux.bench.run import notes  # noqa: E402

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


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Where probes are compiled to: once for all tests of this file."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def test_neighbours():
    """Additions take time in proportion to their number, and a note says when their time varied."""
    additions = native.library().afflux_additions
    few, many = (min(additions(rounds) for _ in range(9)) for rounds in (10_000, 100_000))
    assert 3 < many / few < 30
    seen = Neighbours([2e-5, 1e-5, 3e-5, 1.9e-5])
    assert Neighbours().slowdown is None
    assert seen.slowdown == pytest.approx(1.95)
    assert [
        n
        for n in notes([], [], [{"cores_of_others": 0.0, "additions_slowdown": seen.slowdown}], 20)
        if "1.9 times" in n
    ]
    assert not [n for n in notes([], [], [{"cores_of_others": 0.0, "additions_slowdown": 1.1}], 20) if "additions" in n]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run: what it printed, its JSON text, its Markdown."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    done = bench("--quick", "--rows", "fedbuff,ca2fl", "-d", D, "-M", M, "--threads", THREADS, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    return done, *((folder / name).read_text(encoding="utf-8") for name in ("bench.json", "bench.md"))


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
    assert probes["numpy copyto"] == f32 * 2 * 4 * D
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
    assert next(r for r in ROWS if r.name == row).bytes(D, m) == ceil(D * an_element)


def test_figures_follow_from_the_samples(case):
    for entry in everything(case):
        seconds = entry["seconds"]
        assert len(seconds) == REPEATS
        assert min(seconds) > 0
        assert (entry["min"], entry["max"]) == (min(seconds), max(seconds))
        assert entry["median"] == statistics.median(seconds)
        assert entry["gbps"] == pytest.approx(entry["bytes"] / entry["median"] / 1e9)


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
    loss = {"row": "push", "name": "torch", "but": "only copies", "times": [3.0, 1.5]}
    at = [{"d": d, "m": 5, "clients": None} for d in (1000, 10)]
    assert tables.sentence(loss | {"at": at}) == "push: torch 1.50x to 3.00x faster, d = 10, 1_000 (only copies)"
    assert tables.sentence(loss | {"at": at[:1], "times": [2.0], "but": ""}) == "push: torch 2.00x faster"


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
        assert [c["name"] for c in row if c["part"]] == (["afflux gram"] if name == "wkafl" else [])
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
        assert "Operations" in text
        assert "Limits, and the machine's best" in text
        assert "Where we lose" in text
        assert "not memory speed" in text  # 100,003 elements lie in the cache
        for name in ("afflux", "torch addmv_", "torch mul_", "native: 1 read", "% of limit"):
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
    (plain,) = [c for c in pushes["rows"]["push"] if c["role"] == "plain"]
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


def test_encoded_rows_are_near_the_updates(tmp_path):
    """A step of a grid is at most the range over 2^bits - 1; here |u| < 0.06, and a float16 has 11 bits."""
    path = tmp_path / "out.json"
    done = bench("--quick", "--rows", "mf-ca2fl", "-d", D, "-M", 3, "--threads", THREADS, "--json", path)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    steps = {"affine-8": 0.12 / 255, "affine-4": 0.12 / 15, "rotated-2": 0.06, "float16": 0.06 / 2**11}
    for codec, step in steps.items():
        ours, plain = case["rows"][f"mf-ca2fl-{codec}"]
        assert ours["errors"]["params"]["ulp"] < 1
        assert 0 < ours["errors"]["rows"]["abs"] < step * 1.001
        assert 0 < plain["errors"]["params"]["abs"] <= (3 + 12) * U32 * plain["errors"]["params"]["terms"]
        assert codec == "rotated-2" or plain["errors"]["rows"]["abs"] < step * 1.001


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


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="pages cannot be evicted here")
def test_a_store_beside_memory_and_plain_reading(tmp_path):
    d, m, path = 3_001, 6, tmp_path / "out.json"
    done = bench(
        "--quick", "--rows", "store,store-cold,store-power", "-d", d, "-M", m, "--threads", THREADS, "--json", path
    )
    assert done.returncode == 0, done.stderr
    case, tens = json.loads(path.read_text(encoding="utf-8"))["cases"]
    lines = {c["name"]: c for c in case["rows"]["store"]}
    vector, row = 4 * d, (d + 127) // 128 * (128 // 2 + 8)  # 4 bits an element, and 8 bytes for 128 of them
    for name, c in lines.items():
        same = lines["in memory, the last push" if "last" in name else "in memory"]
        assert c["times_memory"] == pytest.approx(c["median"] / same["median"])
        pushes = 1 if c["part"] else m
        sweep = (m + 2) * vector + 2 * 8 * d + 2 * m * row
        assert c["bytes"] == pytest.approx(2 * pushes * vector + sweep, rel=0.01)
        assert c["errors"]["params"]["ulp"] < 1
    cold, warm, plain = case["rows"]["store-cold"]
    assert plain["bytes"] == pytest.approx(m * row, rel=0.03)  # the last 128 are not full
    assert cold["bytes"] == warm["bytes"] == 2 * m * vector + plain["bytes"]
    assert cold["times_both"] == pytest.approx(cold["median"] / (warm["median"] + plain["median"]))
    assert cold["times_reading"] == pytest.approx((cold["median"] - warm["median"]) / plain["median"])
    process, memory, *power = tens["rows"]["store-power"]
    assert (tens["laps"], memory["times_memory"], len(power)) == (10, 1, 2)
    for line in (process, *power):
        assert line["times_memory"] == pytest.approx(line["median"] / memory["median"])
        assert line["errors"]["params"]["ulp"] < 1


@pytest.mark.parametrize("arguments", [("--rows", "fedbuff,fedbuf"), ("--rows", "")])
def test_unknown_row(arguments):
    done = bench(*arguments)
    assert done.returncode == 2
    assert "known rows: all, scaling, mf-ca2fl, peers, ingest" in done.stderr
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


def test_refuses_an_instruction_set_that_is_not_there():
    done = bench("--quick", "--isa", "sse9")
    assert done.returncode == 2
    assert "sse9" in done.stderr


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


VARIANTS = [
    Variant(ahead, tile, group, past_cache)
    for ahead, tile, group, past_cache in [
        (0, 256, 16, False),
        (512, 1024, 4, True),
        (4096, 4096, 1, False),
        (0, 1024, 16, True),
    ]
]
#: More than one chunk of 65,536, and a tail that fills no cache line.
LENGTH = 150_001


def whole_numbers(count, size=LENGTH):
    """Sums of them are exact in float32."""
    rng = np.random.default_rng(0)
    return [rng.integers(-9, 9, size).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 11, 18])
def test_native_probes_move_what_they_say(variant, count):
    """Every word is read, added and written: nothing is optimised away."""
    vectors = whole_numbers(count + 1)
    reads = [(vector, 4) for vector in vectors[:count]]
    expected = sum(vectors[:count])
    assert sweep(reads, [], [], LENGTH, variant, threads=THREADS, laps=2)() == 2 * expected.sum(dtype=np.float64)
    out, own = np.empty(LENGTH + 3, np.float32)[3:], vectors[count].copy()
    sweep(reads, [(out, 4)], [], LENGTH, variant, threads=THREADS)()
    np.testing.assert_array_equal(out, expected)
    out[:] = 0
    sweep(reads, [(out, 4)], [(own, 4)], LENGTH, variant, threads=THREADS, laps=3)()
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(own, vectors[count] + 3 * expected)


def test_native_probes_count_parts_of_a_byte():
    """Rows of 4 bits and a pair of float32 for 128 elements: 9 words for 64 of them."""
    size, words = 64 * 2000, 9 * 2000
    own, params = whole_numbers(1, words)[0], whole_numbers(1, size)[0]
    expected = own.copy()
    for i in range(0, size, 1024):  # a tile's sum goes to the first words of the same tile
        there = expected[i * 9 // 64 : (i + 1024) * 9 // 64]
        there += params[i : i + there.size]
    sweep([(params, 4)], [], [(own, 0.5625)], size, Variant(tile=1024), threads=THREADS)()
    np.testing.assert_array_equal(own, expected)


def test_native_probes_count_two_and_eight_bytes_an_element():
    size = LENGTH - 1  # an even number: two elements of 2 bytes are a word
    double, half, out = whole_numbers(1, 2 * size)[0], whole_numbers(1, size // 2)[0], np.zeros(size, np.float32)
    total = sweep([(half, 2), (double, 8)], [], [], size, VARIANTS[0], threads=1)()
    assert total == half.sum(dtype=np.float64) + double.sum(dtype=np.float64)
    before = double.copy()
    sweep([(half, 2)], [(out, 2)], [(double, 8)], size, Variant(tile=256), threads=THREADS)()
    np.testing.assert_array_equal(out[: size // 2], half)
    assert (out[size // 2 :] == 0).all()
    tiles = [(half[128 * i : 128 * (i + 1)], slice(512 * i, 512 * i + 128)) for i in range(size // 256)]
    for part, where in tiles:  # a tile's sum goes to the first words of the same tile
        before[where] += part
    np.testing.assert_array_equal(double[: 512 * len(tiles)], before[: 512 * len(tiles)])


def test_without_a_compiler_the_run_goes_on(monkeypatch, tmp_path):
    path = tmp_path / "out.json"
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    done = bench("--quick", "--rows", "gram", "-d", D, "-M", 3, "--json", path)
    assert done.returncode == 0, done.stderr
    assert "no native probes" in done.stdout
    (only,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert not [p for p in only["probes"] if p["name"].startswith("native")]
    assert only["limits"]["gram"]["gbps"] > 0


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(3)'")
    with pytest.raises(native.MissingCompiler, match="failed"):
        native.library.__wrapped__()
    assert not list((tmp_path / "afflux").glob("*.so"))


def test_other_rows(tmp_path):
    """Errors: a copy has none, an inner product is rounded d times, a bfloat16 update is what it was rounded to."""
    path = tmp_path / "out.json"
    isa = next(backend.name for backend in reversed(ops.backends()) if backend.runs and backend.device == "cpu")
    done = bench(
        *("--quick", "--rows", "ingest,gram,fedbuff-bf16,cached", "-d", D, "-M", M, "--isa", isa),
        *("--threads", THREADS, "--json", path),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = {name: lines for case in result["cases"] for name, lines in case["rows"].items()}
    for lines in rows.values():
        assert lines[0]["name"] == "afflux"
        assert lines[0]["isa"] == isa
        assert {line["role"] for line in lines} >= {"ours", "plain", "best"}
    for line in rows["ingest"]:
        assert line["errors"]["slots"]["abs"] == 0
    for line in rows["gram"]:
        exact = line["name"] in ("afflux", "torch U @ U.T, float64")
        error = line["errors"]["gram"]
        assert error["terms"] > 0
        assert error["abs"] <= D * (EPS if exact else U32) * error["terms"]
    bf16 = {line["name"]: line for line in rows["fedbuff-bf16"]}
    assert bf16["afflux"]["errors"]["params"]["ulp"] < 1
    assert bf16["afflux"]["bytes"] == 2 * M * D + 8 * D
    assert bf16["afflux, float32"]["bytes"] == 4 * (M + 2) * D
    assert bf16["afflux"]["times_float32"] == pytest.approx(
        bf16["afflux, float32"]["median"] / bf16["afflux"]["median"]
    )
    cached = next(case for case in result["cases"] if "cached" in case["rows"])
    assert cached["warm"]
    assert cached["laps"] > 1


def test_scaling(tmp_path):
    path = tmp_path / "out.json"
    done = bench("--quick", "--rows", "scaling", "--json", path, "--picture", tmp_path / "growth.png")
    assert done.returncode == 0, done.stderr
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    afflux = {}
    for case in cases:
        for name, lines in case["rows"].items():
            afflux.setdefault(name, []).append(lines[0])
    assert [line["d"] for line in afflux["scaling-d"]] == [10_000, 30_000, 100_000]
    assert sorted(line["m"] for line in afflux["scaling-m"]) == [1, 3, 10]
    assert [line["clients"] for line in afflux["scaling-n"]] == [100, 1_000, 10_000]
    for line in [line for lines in afflux.values() for line in lines]:
        assert 0 < line["errors"]["params"]["ulp"] < 1
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("growth-*"))
