"""What `same_runs.py` compares, and what it leaves out."""

import json

import numpy as np
import pytest

import same_runs
from conftest import check_error

HEADER = {"type": "header", "afflux": "1", "label": "fedbuff", "client_lr": 0.1, "code": {"rule": "0"}}


def write(folder, header=HEADER, weight=0.5, seconds=1.0, accuracy="0.25", buffer=1.0):
    (folder / "audit").mkdir(parents=True)
    lines = [header, {"type": "round", "weights": [weight]}, {"type": "end", "params_sha256": "ab"}]
    (folder / "audit" / "fedbuff-seed0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "audit" / "run_id.txt").write_text(str(folder))
    (folder / "rules.csv").write_text(f"rule,server_ms,server_ms_std\nfedbuff,{seconds},0\n")
    (folder / "metrics.csv").write_text(f"rule,accuracy\nfedbuff,{accuracy}\n")
    (folder / "config.json").write_text(
        json.dumps({"versions": {"afflux": str(seconds)}, "rows": [{"server_ms": seconds}]})
    )
    (folder / "states.txt").write_text("params weight 0\nbuffers running_mean 0\n")
    np.savez(folder / "model.npz", weight=np.zeros(2, np.float32), running_mean=np.full(2, buffer, np.float32))
    return same_runs.contents(folder)


def test_seconds_versions_and_ids_are_not_compared(tmp_path, capsys):
    base, new = (
        write(tmp_path / "a"),
        write(tmp_path / "b", HEADER | {"afflux": "2", "code": {"rule": "1"}}, seconds=2.0),
    )
    same_runs.compare("case", base, new)
    expected = "same  case: 6 names of files, 1 audit logs, 2 params, 3 tables, 1 arrays, 2 buffers\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": HEADER | {"client_lr": 0.2}}, r"case: audit logs differ in 1 of 1\naudit/fedbuff-seed0.jsonl"),
        ({"header": dict(reversed(HEADER.items()))}, "audit logs differ"),
        ({"weight": 0.5000001}, "audit/fedbuff-seed0.jsonl, line 2 .*\n  base .*0.5].*\n  new  .*0.5000001]"),
        ({"accuracy": "0.250"}, "tables differ in 1 of 3\nmetrics.csv, line 2"),
        ({"buffer": np.nextafter(np.float32(1), np.float32(2))}, "buffers differ in 1 of 2\nmodel.npz running_mean"),
    ],
)
def test_a_difference_is_named_with_its_line(tmp_path, change, message):
    base, new = write(tmp_path / "a"), write(tmp_path / "b", **change)
    check_error(message, same_runs.compare, "case", base, new, error=same_runs.DifferenceError)


def test_a_file_that_one_tree_lacks_is_a_difference(tmp_path):
    base, new = write(tmp_path / "a"), write(tmp_path / "b")
    (tmp_path / "b" / "metrics.csv").unlink()
    lacking, text = (
        same_runs.contents(tmp_path / "b"),
        r"names of files differ in 1 of 6\nmetrics.csv has only the base",
    )
    check_error(text, same_runs.compare, "case", base, lacking, error=same_runs.DifferenceError)
    check_error("csv has only the new tree", same_runs.compare, "case", lacking, new, error=same_runs.DifferenceError)
    check_error("nothing to compare", same_runs.compare, "case", {}, new, error=SystemExit)
