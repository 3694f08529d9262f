"""The rows of simulators: what runs without a peer; tests/peers has the peers."""

import json

import numpy as np
import pytest

from bench.rows import GROUPS
from bench.rows.simulators import workload
from bench.rows.simulators.autograd import autograd_alone
from bench.rows.simulators.ours import ours, ours_compiled
from bench.rows.simulators.workload import STEPS, Workload, one_update, one_update_in_float64
from benching import bench, bench_process, cache  # noqa: F401
from counted import Counted, a_counted, logistic_bound, moved
from pairwise import soak

ROWS = {row.name: row for row in GROUPS["simulators"]}
MODELS = {"simulators-logistic": workload.logistic, "simulators-cnn": workload.cnn}


@pytest.mark.parametrize("simulator", [ours, autograd_alone])
def test_so_many_updates_of_so_many_steps(simulator):
    run = simulator(Workload(a_counted, 30))()
    Counted.calls = 0
    params = run()
    assert Counted.calls == 30 * STEPS
    assert (moved(params, a_counted) > 0.01) == (simulator is ours)


@pytest.mark.parametrize("simulator", [ours, *soak(ours_compiled)])
def test_one_update_is_that_of_the_definition(simulator):
    exact, _ = one_update_in_float64(workload.logistic)
    assert np.abs(simulator(one_update(workload.logistic))()() - exact).max() < logistic_bound()
    assert moved(exact, workload.logistic) > 100 * logistic_bound()


@pytest.mark.parametrize("compiler", ["no-such-compiler", *soak("c++")])
def test_the_row(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    path = tmp_path / "out.json"
    done = bench_process("--quick", "--rows", "simulators-logistic", "--json", path)
    assert done.returncode == 0, done.stderr
    assert "updates a second" in done.stdout
    result = json.loads(path.read_text(encoding="utf-8"))
    ((case,), row) = result["cases"], ROWS["simulators-logistic"]
    lines = {line["name"]: line for line in case["rows"][row.name]}
    assert (case["d"], case["m"], case["threads"]) == (7_850, 20, 1)
    absent = {contender.name for contender in row.contenders if contender.absent()}
    assert set(lines) == {contender.name for contender in row.contenders} - absent
    notes = " ".join(result["settings"]["notes"])
    assert all(name in notes for name in absent)
    for name, line in lines.items():
        assert line["us"] == pytest.approx(1e6 * line["median"] / 20)
        assert line["updates"] == pytest.approx(20 / line["median"])
        assert line["times"] == pytest.approx(line["median"] / lines["afflux"]["median"])
        assert set(line["errors"]) == ({"params"} if name != "autograd alone" else set())


@pytest.mark.parametrize("name", ROWS)
def test_the_sizes_are_those_of_the_models(name):
    done = bench("--list")
    size = workload.flat(MODELS[name]()).size
    updates = {"simulators-logistic": 400, "simulators-cnn": 60}[name]
    assert f"cases: d = {size:_}, M = {updates}" in done.stdout.split(f"\n{name} ")[1].split("\n- ")[0]


@pytest.mark.parametrize("arguments", [("-d", 100), ("-M", 10), ("-M", 25)])
def test_sizes_that_cannot_be(arguments):
    done = bench("--rows", "simulators", *arguments)
    assert done.returncode == 2
    assert "in the rows of simulators" in done.stderr
