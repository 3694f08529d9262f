"""The benchmark's other rows: each runs, and its errors are within their bounds."""

import os
import re

import pytest

from afflux import ops
from benching import THREADS, D, M, cache, quick_cases  # noqa: F401
from oracle import EPS, U32

pytest.importorskip("torch")


def test_rounds_over_m(tmp_path):
    d = 3_001
    printed, cases = quick_cases(tmp_path, "rounds", "-d", d)
    assert "vs M = 10" in printed
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


def test_trimmed_means_beside_the_mean(tmp_path):
    _, cases = quick_cases(tmp_path, "trimmed", "-d", 3_001)
    assert [case["m"] for case in cases] == [1, 10, 32, 64]
    for case in cases:
        times = {c["name"]: c["median"] for c in case["rows"]["trimmed"]}
        assert [*times] == ["afflux", "afflux, weighted", "afflux, the mean", "torch sort"]
        for c in case["rows"]["trimmed"]:
            assert c["of_mean"] == pytest.approx(times["afflux, the mean"] / c["median"])
            if c["name"] == "afflux, the mean":
                assert c["errors"] == {}
                continue
            error = c["errors"]["params"]
            assert error["abs"] <= (case["m"] + 8) * U32 * error["terms"]
            assert error["ulp"] < 1 or c["name"] == "torch sort"


def test_a_push_and_sizes_of_ones_own(tmp_path):
    d, m = 999, 6
    _, (pushes, rounds) = quick_cases(tmp_path, "push,rounds", "-d", d, "-M", m)
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
    _, (case,) = quick_cases(tmp_path, "mf-ca2fl", "-d", D, "-M", 3)
    steps = {"affine-8": 0.12 / 255, "affine-4": 0.12 / 15, "rotated-2": 0.06, "float16": 0.06 / 2**11}
    for codec, step in steps.items():
        ours, plain = case["rows"][f"mf-ca2fl-{codec}"]
        assert ours["errors"]["params"]["ulp"] < 1
        assert 0 < ours["errors"]["rows"]["abs"] < step * 1.001
        assert 0 < plain["errors"]["params"]["abs"] <= (3 + 12) * U32 * plain["errors"]["params"]["terms"]
        assert codec == "rotated-2" or plain["errors"]["rows"]["abs"] < step * 1.001


def test_streaming_beside_buffers(tmp_path):
    d, m = 3_001, 6
    _, (case,) = quick_cases(tmp_path, "streaming", "-d", d, "-M", m)
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
    d, m = 3_001, 6
    _, (case, tens) = quick_cases(tmp_path, "store,store-cold,store-power", "-d", d, "-M", m)
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


def test_other_rows(tmp_path):
    """Errors: a copy has none, an inner product is rounded d times, a bfloat16 update is what it was rounded to."""
    isa = next(backend.name for backend in reversed(ops.backends()) if backend.runs and backend.device == "cpu")
    _, cases = quick_cases(tmp_path, "ingest,gram,fedbuff-bf16,cached", "-d", D, "-M", M, "--isa", isa)
    rows = {name: lines for case in cases for name, lines in case["rows"].items()}
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
    cached = next(case for case in cases if "cached" in case["rows"])
    assert cached["warm"]
    assert cached["laps"] > 1


def test_noise_beside_none(tmp_path):
    """The reference has the noise: without it, the error would be thousands of ulps."""
    _, (case,) = quick_cases(tmp_path, "noise", "-d", D, "-M", M)
    noisy, plain = case["rows"]["noise"]
    assert noisy["times_without"] == pytest.approx(noisy["median"] / plain["median"])
    assert plain["times_without"] == 1
    assert max(line["errors"]["params"]["ulp"] for line in (noisy, plain)) < 1


def test_scaling(tmp_path):
    _, cases = quick_cases(tmp_path, "scaling", "--picture", tmp_path / "growth.png")
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


def test_hosts(tmp_path):
    """All forms of a row compute the same; a step has its time beside the sweep of its arrays."""
    _, cases = quick_cases(tmp_path, "hosts", "-d", 3_001)
    rows = [(name, row) for case in cases for name, row in case["rows"].items()]
    assert len(rows) == 8
    for name, row in rows:
        first = row[0]
        assert [line["role"] for line in row] == sorted((line["role"] for line in row), reverse=True)
        assert {line["role"] for line in row} == {"ours", "best"}
        for line in row:
            assert line["threads"] == 1
            assert line["times_cpu"] == pytest.approx(line["cpu"] / first["cpu"])
            error = line["errors"]["params"]
            assert error["abs"] <= (line["m"] + 12) * U32 * error["terms"]
            assert line["role"] == "best" or error["ulp"] < 1
        if name == "hosts-step":
            (sweep,) = [line for line in row if line["name"] == "sweep"]
            assert first["us_beside"] == pytest.approx(1e6 * (first["median"] - sweep["median"]))
