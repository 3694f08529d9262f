"""Bytes up and down: the model, with buffers in their dtypes, once an arrival and once a dispatch, and SCAFFOLD's c."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

import made_runs
import own_tasks
from afflux.lab import read_results
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.results.run_result import Evaluation
from afflux.lab.results.simulation_results import SimulationResults
from afflux.lab.runs.run_record import message_bytes
from afflux.lab.runs.setup import RunSetup
from afflux.sim import scaffold
from conftest import check_refused


def with_buffers():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(own_tasks.X.shape[1]), own_tasks.linear(np.random.default_rng(0)))


simulation = partial(made_runs.simulation, rules="fedbuff:buffer_size=2", arrivals=8, concurrency=4, eval_every=4)


def test_each_arrival_is_one_model_up_and_each_dispatch_one_down(tmp_path):
    (run,) = results = simulation().run(out=tmp_path / "out")
    size = 4 * len(run.params)
    # Four clients train at once: at the k-th arrival, k + 3 have pulled.
    assert run.sent_bytes == ((0, 0), (4 * size, 7 * size), (8 * size, 11 * size))
    assert (run.bytes_up, run.bytes_down) == run.sent_bytes[-1]
    (again,) = read = read_results(tmp_path / "out")
    assert again.sent_bytes == run.sent_bytes
    table = read.to_dataframe("bytes")
    assert [*table.columns] == ["rule", "seed", "arrivals", "up", "down"]
    assert table.iloc[-1].tolist() == [run.spec.label, 0, 8, 8 * size, 11 * size]
    assert (tmp_path / "out" / "bytes.csv").read_text().count("\n") == 4
    target = run.evaluations[1].score
    assert run.summary(target)["bytes_to_target"] in (0, 11 * size)
    results.draw(tmp_path / "figure.svg", x="bytes", size=3.3)
    assert "bytes sent, up and down" in (tmp_path / "figure.svg").read_text()
    report = (tmp_path / "out" / "report.html").read_text()
    assert "MB from clients to the server" in report


def test_buffers_have_their_own_dtypes_and_scaffold_sends_c_too():
    def message(**task):
        made = simulation(**task)
        return message_bytes(RunSetup(made.config, 0, made.task))

    plain, d = sum(message()) // 2, own_tasks.X.shape[1]
    assert message() == (plain, plain)
    buffers = 2 * 4 * d + 8  # two float32 means or variances, and an int64 counter; weight and bias are params
    assert message(model=with_buffers) == (plain + 2 * 4 * d + buffers,) * 2
    assert message(training=scaffold(0.1)) == (2 * plain, 2 * plain)
    assert message(training=scaffold(0.1, control_codec="bfloat16")) == (2 * plain, 3 * plain)


def test_a_failed_upload_counts_and_a_run_of_an_older_checkpoint_has_no_bytes(tmp_path):
    def fails(model, data, rng):
        if rng.random() < 0.5:
            raise ZeroDivisionError
        return 1.0, 1, 1

    (run,) = results = simulation(training=fails).run(out=tmp_path / "out")
    assert run.decisions["faulty"] > 0
    assert run.bytes_up == 8 * 4 * len(run.params)
    older = SimulationResults([replace(run, sent_bytes=())], results.config)
    assert (older[0].sent_bytes, np.isnan(older[0].bytes_up)) == ((), True)
    assert isinstance(results[0].evaluations[0], Evaluation)
    check_refused("x is bytes, which runs of an earlier afflux", older.draw, tmp_path / "figure.pdf", x="bytes")


def test_lost_uploads_count_too_and_a_run_that_is_read_has_them(tmp_path):
    laws = {"dropout": "rates:never=0.3:upload=0.3", "timeout": 3.0}
    (run,) = simulation(arrivals=20, **laws).run(out=tmp_path / "out")
    (log,) = (tmp_path / "out" / "audit").glob("*.jsonl")
    fates = [line.fate for line in read_audit_log(log).dropouts]
    size = 4 * len(run.params)
    assert {*fates} == {"never", "upload", "late"}
    assert run.bytes_up == (20 + len(fates) - fates.count("never")) * size
    assert 0 <= run.bytes_down / size - 20 - len(fates) < 4  # the others train
    (again,) = read_results(tmp_path / "out")
    assert again.decisions == run.decisions == {"joined": 20, "lost": len(fates)}
    assert again.sent_bytes == run.sent_bytes
