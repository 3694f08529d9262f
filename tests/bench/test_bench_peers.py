"""The benchmark's peers compute the formulas of their rows; a run without them prints a note and continues."""

import json
import os

import pytest

from bench.rows import GROUPS
from benching import run_in_project
from oracle import U32

pytest.importorskip("torch")

D, M = 3_001, 7
ROWS = GROUPS["peers"]
PACKAGES = ("appfl", "fedlab", "flgo", "fluke", "flwr", "nvflare", "omegaconf", "pfl")
BFLOAT16 = "afflux, bfloat16 slots"
FLAT = {"afflux, step", "afflux, streaming", BFLOAT16, "torch copy_, addmv_"}
#: Row -> those who need no peer.
HERE = {
    "peers-native": {"torch mv"},
    "peers-flat": FLAT,
    "peers-adam": {"torch fused Adam"},
    "peers-small": FLAT,
    "from-models": set(),
}
#: A peer's name -> why it cannot run here. Only a run imports peers: so these are functions.
PEERS = {c.name: c.absent for row in ROWS for c in row.contenders if set(c.modules) - {"torch"}}


def bench(*arguments, hidden=()):
    """Runs `python -m bench --quick` in a process that cannot import what is hidden; returns what it printed.

    No compiler: probes are of no interest here.
    """
    start = f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); from bench.__main__ import main; main()"
    env = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "CXX": "no-such-compiler"}
    done = run_in_project("-c", start, "--quick", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(path, **hidden):
    printed = bench("--rows", "peers", "-d", D, "-M", M, "--threads", 2, "--json", path, **hidden)
    return printed, json.loads(path.read_text(encoding="utf-8"))


def rows_of(result):
    """Row -> contender -> its line."""
    return {name: {c["name"]: c for c in row} for case in result["cases"] for name, row in case["rows"].items()}


@pytest.fixture(scope="module")
def here_and_now(tmp_path_factory, without_peers):
    """With the peers that are here."""
    if all(why() for why in PEERS.values()):
        return rows_of(without_peers[1])
    return rows_of(run(tmp_path_factory.mktemp("peers") / "out.json")[1])


@pytest.fixture(scope="module")
def without_peers(tmp_path_factory):
    return run(tmp_path_factory.mktemp("peers") / "out.json", hidden=PACKAGES)


def test_listed_without_peers():
    printed = bench("--list", hidden=PACKAGES)
    assert all(f"- {name} [peer]: " in printed for name in PEERS)
    assert all(f"\n{row.name} " in printed for row in ROWS)
    assert not {row.name for row in GROUPS["all"]} & {row.name for row in ROWS}


def test_runs_without_peers(without_peers):
    printed, result = without_peers
    assert {name: set(row) for name, row in rows_of(result).items()} == {
        name: names | {"afflux", "torch stack().mean"} for name, names in HERE.items()
    }
    notes = " ".join(note for note in result["settings"]["notes"] if note.startswith("left out: "))
    for word in (*PEERS, *PACKAGES):
        assert word in notes
        assert word in printed


def test_ours(here_and_now):
    vectors = {
        "peers-native": M + 1,
        "peers-flat": M + 2,
        "peers-adam": M + 6,
        "peers-small": M + 2,
        "from-models": M + 2,
    }
    for row, lines in here_and_now.items():
        assert {line["bytes"] for line in lines.values()} == {4 * D * vectors[row]}
        for name, line in lines.items():
            assert (line["role"] == "peer") == (name in PEERS)
            if name not in PEERS:
                check(name, line, differences=row == "from-models")
    for row in ("peers-small", "from-models"):
        for line in here_and_now[row].values():
            assert line["us"] == pytest.approx(1e6 * line["median"] / M)


@pytest.mark.parametrize("name", PEERS)
def test_peer(name, request):
    if why := PEERS[name]():
        pytest.skip(f"{why} (make frameworks installs it)")
    found = [(name_of, row[name]) for name_of, row in request.getfixturevalue("here_and_now").items() if name in row]
    assert found
    for row, line in found:
        check(name, line, differences=row == "from-models")


def check(name, line, *, differences=False):
    """The mean rounds M + 8 times, in no more than the sum of the terms; a server's Adam less than twelve times more.

    APPFL goes through M differences to its own x, as large as the largest term: thrice as many, of twice the size.
    Ours rounds once, or each vector to bfloat16, whose half unit in the last place is 2^-9. From models each difference
    is rounded too, ours once more.
    """
    unit = (6 if name.startswith("appfl") else 1) * (M + 20) * U32
    exact = name in ("afflux", "afflux, step", "afflux, streaming")
    if name == BFLOAT16:
        unit = 2.0**-9 + U32
    elif exact:
        unit = (1 + differences) * U32 * (1 + 1e-6)
    for output in {"params"} | set(line["errors"]):
        error = line["errors"][output]
        assert error["terms"] > 0.005  # the inputs were not zeros
        assert error["abs"] <= unit * error["terms"], output
    assert (line["errors"]["params"]["ulp"] < 0.51) == (exact and not differences)


def test_a_row_that_cannot_run_here_says_why():
    with pytest.raises(AssertionError, match=r"nothing in flower-adapter can run here: ModuleNotFoundError: .*flwr"):
        bench("--rows", "flower-adapter", "--quick", hidden=["flwr"])
