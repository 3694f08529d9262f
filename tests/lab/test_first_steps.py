"""Mistakes of a first simulation get an error that says what to write, and what the messages offer is accepted."""

import json
import re
from functools import partial

import numpy as np
import pandas
import pytest
from torch import nn

import afflux.sim
import made_runs
import own_tasks
from afflux import rules
from afflux.cli.lab.terminal import results_table
from afflux.lab import read_audit_log, read_results
from afflux.lab.results.finished_runs import FILE
from afflux.sim import ConfigError, DivergedError, classification, partitioned, sgd
from afflux.sim.workload.config import SimConfig
from conftest import check_error, check_refused

RULES_AS_TEXT = r"a string such as 'fedbuff:buffer_size=10', 'LABEL=fedbuff', or 'FILE\.py:FUNCTION'"
TWO_ARRAYS = r"divide the examples by partitioned\(x, y, num_clients=\.\.\.\)"
WRONG_TRAINING = r"training <lambda>\(.*\) must take \(model, data, rng\): "


simulation = partial(made_runs.simulation, arrivals=24, concurrency=6, eval_every=12)


def test_a_loss_may_be_unknown(tmp_path):
    out = tmp_path / "out"
    (result,) = simulation(lambda model, data, rng: (None, 1, 5)).run(out=out)
    assert result.decisions == {"joined": 24}
    log = read_audit_log(out / "audit" / "fedbuff-seed0.jsonl")
    assert {line.loss for line in log.arrivals} == {None}


def test_a_divergence_is_said_once():
    text = "^fedbuff, seed 0: client [0-9]+ diverged at arrival 1: its loss is nan; lower client_lr or server_lr, or "
    diverging = simulation(lambda model, data, rng: (float("nan"), 1, 1))
    assert "[push]" not in str(check_error(text, diverging.run, error=DivergedError))


def test_a_constant_by_its_role_is_called_so():
    def training(model, data, rng):
        model.bias.data.add_(1.0)
        return 1.0, 1, 1

    with pytest.raises(ConfigError, match="parameter bias is constant by roles=, but the training has changed it"):
        simulation(training, model=nn.Linear(6, 3), roles={"bias": "constant"}).run()


def fails_at_times(model, data, rng):
    return (float("nan") if rng.random() < 0.3 else 1.0), 1, 1


def test_arrivals_that_did_not_join_stand_in_the_printed_table():
    rows = {
        training: [column.header for column in results_table(results, results.config).columns]
        for training in (None, fails_at_times)
        for results in [simulation(training, rules=["fedasync"], arrivals=40).run()]
    }
    assert [title for title in rows[fails_at_times] if title not in rows[None]] == ["faulty\narrivals"]


def same(one, two):
    return json.dumps(one, default=str) == json.dumps(two, default=str)


def test_a_run_folder_is_read_again(tmp_path):
    out = tmp_path / "out"
    written = simulation(fails_at_times, rules=["fedbuff:buffer_size=4", "fedasync"], seeds=[3, 5], paired=True).run(
        out=out
    )
    results, record = read_results(out), (out / FILE).read_text()
    assert (results.failures, record.count('"status": "open"')) == ((), 2)
    check_same(results, written)
    (out / FILE).write_text("{}\n")
    check_refused("holds no finished runs: KeyError", read_results, out)
    (out / FILE).write_bytes(b"\xff" * 1000 + b"\n")
    assert len(str(check_refused("holds no finished runs: Unicode", read_results, out))) < 500
    check_refused("holds no results of a run", read_results, tmp_path)


def test_a_folder_where_a_file_is_written(tmp_path):
    """Neither results nor pictures replace it, and no other file has changed."""
    out, one_more = tmp_path / "out", {"seeds": [0, 1]}
    results = simulation(arrivals=12).run(out=out)
    page = out / "report.html"
    page.unlink()
    page.mkdir()
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    check_refused(f"cannot write {re.escape(str(page))}: it is a folder", results.write, out)
    check_refused("is not an empty folder", simulation(arrivals=12, **one_more).run, out=out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    page.rmdir()
    (out / "models" / "fedbuff-seed1.safetensors").mkdir()
    check_refused(r"cannot write .*fedbuff-seed1\.safetensors: ", simulation(arrivals=12, **one_more).run, out=out)
    (tmp_path / "picture.png").mkdir()
    check_refused(r"cannot write .*picture\.png: ", results.draw, tmp_path / "picture.png")
    check_refused(r"cannot write .*metrics\.csv: ", results.write, out / "metrics.csv")


def check_same(results, written):
    assert [run.spec for run in results] == [run.spec for run in written]
    for run, original in zip(results, written, strict=True):
        assert run.digest == original.digest
        assert run.decisions == original.decisions
        assert run.totals == original.totals
        assert run.first_params_sha256 == original.first_params_sha256 != ""
        assert same(run.summary(0.5), original.summary(0.5))
        assert (run.leader, run.settings, run.division) == (original.leader, original.settings, original.division)
    for table in ("evaluations", "arrivals", "participation", "differences"):
        assert results.to_dataframe(table).equals(written.to_dataframe(table)), table


def test_results_of_several_folders_are_merged_under_new_labels(tmp_path):
    first = simulation(arrivals=8, rules="fedasync", seeds=[0, 1]).run(out=tmp_path / "a")
    second = simulation(arrivals=8, rules=["fedasync", "fedbuff:buffer_size=4"], seeds=[0]).run(out=tmp_path / "b")
    check_refused("there are 2 runs of fedasync, seed 0: relabel", read_results, tmp_path / "a", tmp_path / "b")
    other = read_results(tmp_path / "b", labels={"fedasync": "other"})
    results = read_results(tmp_path / "a").merge(other).relabel({"fedbuff:buffer_size=4": "FedBuff"})
    runs = {(run.spec.label, run.seed): run for run in results}
    assert [*runs] == [("fedasync", 0), ("other", 0), ("FedBuff", 0), ("fedasync", 1)]
    assert runs["other", 0].digest == second[0].digest == first[0].digest
    results.draw(tmp_path / "figure.svg", size=3.3)
    assert "FedBuff" in (tmp_path / "figure.svg").read_text()
    for labels, message in (({"none": "x"}, "unknown rule 'none'"), ({"other": "FedBuff"}, "have the same label")):
        check_refused(message, results.relabel, labels)


def test_data_frames_are_divided_like_arrays():
    x, y = pandas.DataFrame(own_tasks.X.numpy()), pandas.Series(own_tasks.Y.numpy())
    one, two = partitioned(own_tasks.X.numpy(), own_tasks.Y.numpy(), 4).for_seed(2), partitioned(x, y, 4).for_seed(2)
    for (a, b), (c, d) in zip(one, two, strict=True):
        assert (np.array_equal(a, c), np.array_equal(b, d)) == (True, True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: partitioned(np.zeros((2, 3)), ["a", "b"], 2), "partitioned: y holds <U1, must hold numbers"),
        (lambda: classification([["a"]], [0]), "classification: x holds <U1, must hold numbers"),
        (lambda: simulation(seeds=3), r"seeds is 3, must be a sequence of whole numbers, such as \[0, 1, 2\]"),
        (lambda: simulation(seeds=[1.5]), r"seeds is \[1.5\], must be a sequence of whole numbers"),
        (lambda: simulation(rules=[rules.wkafl(alpha=0.2)]), f"a rule is of type Rule, must be {RULES_AS_TEXT}"),
        (lambda: simulation(rules=["fedasync", "fedasync"]), "a rule is given twice: fedasync, fedasync"),
        (lambda: simulation(lambda model, data: (1.0, 1, 1)), WRONG_TRAINING),
        (lambda: simulation(lambda model, data, rng, more: (1.0, 1, 1)), WRONG_TRAINING),
        (lambda: simulation(clients=(own_tasks.X, own_tasks.Y)), TWO_ARRAYS),
        (lambda: simulation(clients=(np.asarray(own_tasks.X), np.asarray(own_tasks.Y))), TWO_ARRAYS),
        (lambda: simulation(rules=3), "a rule is of type int, must be a string such as"),
        (lambda: simulation(rules={"fedbuff": "a"}), f"a rule is of type dict, must be {RULES_AS_TEXT}"),
        (lambda: simulation(rules=None), "a rule is of type NoneType, must be a string such as"),
        (lambda: simulation(rules=rules.fedbuff), "a rule is of type function, must be a string such as"),
        (lambda: simulation(rounds=1.5), "rounds is 1.5, must be a whole number"),
        (lambda: simulation(concurrency=True), "concurrency is True, must be a whole number"),
        (lambda: simulation(sgd("0.1")), "client_lr is '0.1', must be a number"),
        (lambda: simulation(stop_at_target=1), "stop_at_target is 1, must be True or False"),
        (lambda: SimConfig(task=3), "task is 3, must be a string"),
        (lambda: simulation(delays=np.ones(12)), r"delays is array\(.*, must be a function"),
        (lambda: simulation(delays=lambda client, rng: 1.0).run(), "delays: the law is 1.0, must be a function "),
    ],
)
def test_other_things_than_arrays_functions_and_sequences(make, message):
    check_refused(message, make)


def test_numbers_of_numpy_are_numbers(tmp_path):
    """The run folder is read back with the settings as they were."""
    settings = {"arrivals": np.int64(12), "stop_at_target": np.bool_(True), "seeds": np.arange(2)}
    own = simulation(sgd(np.float32(0.5)), **settings)
    assert (own.config.arrivals, own.config.client_lr, own.config.stop_at_target) == (12, 0.5, True)
    assert [type(job.seed) for job in own.jobs] == [int, int]
    own.run(out=tmp_path)
    assert read_results(tmp_path).config == own.config
    assert SimConfig(data="mnist", data_dir=tmp_path).data_dir == str(tmp_path)


def test_the_public_names_are_listed():
    """For completion in a notebook, and for help()."""
    assert {*afflux.sim.__all__} <= {*dir(afflux.sim)}
