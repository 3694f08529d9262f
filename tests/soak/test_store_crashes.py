"""Killed at random moments and at each line of a commit, a store reopens at its last commit, with the right bits."""

import os

import pytest

from conftest import FORKS
from crashes import CASES, Case, each_step, kills, name
from pairwise import soak

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


@pytest.mark.parametrize("count", [4, soak(30)])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_killed_at_random(case, count, tmp_path):
    kills(case, str(tmp_path / "store"), count)


@pytest.mark.parametrize(
    ("case", "step"),
    [*zip(LINES, [61, 113, 131, 127, 101], strict=True), soak(LINES[0], 1), *(soak(case, 7) for case in LINES[1:])],
    ids=lambda value: getattr(value, "rule", str(value)),
)
def test_killed_at_each_step(case, step, tmp_path):
    assert each_step(case, str(tmp_path / "store"), step) > 100
