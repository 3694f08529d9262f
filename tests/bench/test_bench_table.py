"""`afflux bench`: its contenders compute the same, and its figures follow from their times."""

import json
import subprocess
import sys

import numpy as np
import pytest

from afflux.cli import bench as table

D, M = 1_003, 3


def test_all_contenders_of_an_operation_compute_the_same():
    for operation in table.operations(table.Inputs(D, M, 2)):
        ours, *others = (np.asarray(call(), np.float64) for call in operation.contenders.values())
        for other in others:
            np.testing.assert_allclose(other, ours, rtol=1e-4, atol=1e-5 * np.abs(ours).max(), err_msg=operation.name)
        assert len(operation.contenders) == (1 if operation.name in ("encode", "decode") else 3)


def test_figures_follow_from_the_times():
    operation = table.Operation("sum", "s", 3_000_000, {}, {"afflux": [1e-3, 2e-3, 9e-3], "NumPy": [4e-3] * 3})
    figures = operation.figures(copy_speed=2e9)
    assert figures["seconds"] == {"afflux": 2e-3, "NumPy": 4e-3}
    assert figures["gbps"] == pytest.approx(1.5)
    assert figures["percent_of_copy"] == pytest.approx(75)
    head, line = table.lines([figures])
    assert head.split() == ["MB", "ms", "GB/s", "of", "copy", "NumPy", "ms", "x"]
    assert line.split() == ["sum", "3", "2", "1.5", "75", "%", "4", "2.00", "s"]


def test_the_command_without_torch():
    start = "import sys; sys.modules['torch'] = None; from afflux.cli import main; main()"
    command = [sys.executable, "-c", start, "bench", "-d", str(D), "-M", str(M), "--repeats", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["d"], result["m"], result["repeats"]) == (D, M, 2)
    assert result["copy_gbps"] > 0
    assert {operation["operation"]: operation["bytes"] for operation in result["operations"]} == {
        "ingest": 8 * D,
        "gram": 4 * D * M,
        "inner": 4 * D * (M + 1),
        "fedbuff": 4 * D * (M + 2),
        "fadas": 4 * D * (M + 8),
        "ca2fl": 4 * D * (3 * M + 2) + 16 * D,
        "encode": 4 * D + table.CODEC.row_bytes(D),
        "decode": 4 * D + table.CODEC.row_bytes(D),
    }
    assert all("torch" not in operation["seconds"] for operation in result["operations"])
