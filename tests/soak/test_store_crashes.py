"""Killed at random moments and at each line of a commit, a store reopens at its last commit, with the right bits."""

import json
import os

import pytest

from conftest import FORKS
from crashes import CASES, PIECE, Case, each_step, kills, many, name
from pairwise import soak, soak_all

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings(FORKS),
]

LINES = [
    Case("ca2fl"),
    Case("ca2fl", commit_every=2, codec="affine-vector-2"),
    Case("ca2fl", commit_every=2, checkpoints=0.5),
    Case("gsgm"),
    Case("wkafl"),
]


#: More where commits are few: a slot that was freed too early is written over only then.
KILLS = [(case, 12 if case.commit_every == 3 else 4) for case in CASES]


@pytest.mark.parametrize(
    ("case", "count"),
    [*KILLS, *soak_all((case, 30) for case in CASES)],
    ids=lambda value: name(value) if isinstance(value, Case) else str(value),
)
def test_killed_at_random(case, count, tmp_path):
    kills(case, str(tmp_path / "store"), count)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        *zip(LINES, [61, 19, 131, 127, 101], strict=True),
        *soak(LINES[0], 1),
        *soak_all((case, 7) for case in LINES[1:]),
    ],
    ids=lambda value: getattr(value, "rule", str(value)),
)
def test_killed_at_each_step(case, step, tmp_path):
    assert each_step(case, str(tmp_path / "store"), step) > 100


def test_many_kills_are_counted_and_go_on_where_they_stopped(tmp_path):
    file = tmp_path / "kills.json"
    for _ in range(2):
        many(PIECE, file)
        assert sum(json.loads(file.read_text()).values()) == PIECE
