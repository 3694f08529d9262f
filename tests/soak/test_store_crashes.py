"""Killed at random moments and at each line of a commit, a store reopens at its last commit, with the right bits."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from conftest import FORKING
from crashes import CASES, PIECE, Case, each_step, kills, many, name
from pairwise import soak, soak_all

pytestmark = FORKING

LINES = [
    Case("ca2fl"),
    Case("ca2fl", commit_every=2, codec="affine-vector-2"),
    Case("ca2fl", commit_every=2, checkpoints=0.5),
    Case("gsgm"),
    Case("wkafl"),
]


@pytest.fixture(scope="module")
def driver():
    """A process that has imported little: to fork this one, which has imported torch and jax, takes longer."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


#: More where commits are few: a slot that was freed too early is written over only then.
KILLS = [(case, 12 if case.commit_every == 3 else 4) for case in CASES]


@pytest.mark.parametrize(
    ("case", "count"),
    [*KILLS, *soak_all((case, 30) for case in CASES)],
    ids=lambda value: name(value) if isinstance(value, Case) else str(value),
)
def test_killed_at_random(case, count, driver, tmp_path):
    driver.submit(kills, case, str(tmp_path / "store"), count).result()


@pytest.mark.parametrize(
    ("case", "step"),
    [*zip(LINES, [61, 19, 131, 127, 101], strict=True), *soak(LINES[0], 1), *soak_all((case, 7) for case in LINES[1:])],
    ids=lambda value: getattr(value, "rule", str(value)),
)
def test_killed_at_each_step(case, step, driver, tmp_path):
    assert driver.submit(each_step, case, str(tmp_path / "store"), step).result() > 100


def test_many_kills_are_counted_and_go_on_where_they_stopped(driver, tmp_path):
    file = tmp_path / "kills.json"
    for _ in range(2):
        driver.submit(many, PIECE, file).result()
        assert sum(json.loads(file.read_text()).values()) == PIECE
