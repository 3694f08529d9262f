"""Killed at random moments and at each line of a commit, a store reopens at its last commit, with the right bits."""

import os

import pytest

from conftest import FORKS
from crashes import CASES, Case, each_step, kills, name

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings(FORKS),
]

#: Together more than 200; the longer target asks for ten times as many.
KILLS = int(os.environ.get("AFFLUX_KILLS", "30"))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_killed_at_random(case, tmp_path):
    kills(case, str(tmp_path / "store"), KILLS)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (Case("ca2fl"), 3),
        (Case("ca2fl", commit_every=2, codec="affine-vector-2"), 7),
        (Case("ca2fl", commit_every=2, checkpoints=0.5), 7),
        (Case("gsgm"), 7),
        (Case("wkafl"), 7),
    ],
    ids=lambda value: getattr(value, "rule", str(value)),
)
def test_killed_at_each_step(case, step, tmp_path):
    assert each_step(case, str(tmp_path / "store"), step) > 100
