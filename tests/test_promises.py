"""docs/reference/promises.md: each promise names tests that `make test` runs."""

import re
from functools import cache
from pathlib import Path

import pytest

from conftest import ROOT, TESTS

PAGE = ROOT / "docs" / "reference" / "promises.md"
TEST = r"def (test_\w+)"
#: A test that is only for `make soak`.
SOAK = r"@pytest\.mark\.soak\n(?:[@ )\]].*\n)*" + TEST
#: A promise that goes, and the tests of it, are named in the changelog; then this falls.
LEAST_TESTS = 431


@cache
def suite(file: Path) -> set[str]:
    """The names of the tests of a file that `make test` runs."""
    source = file.read_text(encoding="utf-8")
    return {*re.findall(TEST, source)} - {*re.findall(SOAK, source)}


def promises() -> list[tuple[str, list[str]]]:
    """Each promise of the page, an entry of a list, and the tests named in the lines below it."""
    entries = re.findall(r"^- (.+)\n((?:  .+\n)*)", PAGE.read_text(encoding="utf-8"), re.M)
    return [(promise, re.findall(r"`([^`]+)`", tests)) for promise, tests in entries]


def problems(promise: str, tests: list[str]) -> list[str]:
    """What is wrong with an entry of the page."""
    wrong = [] if tests else [f"no test is named for: {promise}"]
    for test in tests:
        path, _, name = test.partition("::")
        if not (TESTS / path).is_file():
            wrong.append(f"there is no file tests/{path}")
        elif name not in suite(TESTS / path):
            wrong.append(f"tests/{path} has no {name} that `make test` runs")
    return wrong


def test_each_promise_has_a_test():
    entries = promises()
    assert len(entries) == PAGE.read_text(encoding="utf-8").count("\n- ")
    tests = [test for _, named in entries for test in named]
    assert len(tests) == len(set(tests)) >= LEAST_TESTS
    assert [wrong for entry in entries for wrong in problems(*entry)] == []


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("server/test_flush_after.py::test_nothing_of_this_name", "has no test_nothing"),
        (
            "engine/test_codecs.py::test_the_bound_of_rotated_errors_is_that_of_a_linear_program",
            "has no test_the_bound",
        ),
        ("server/test_no_file.py::test_a", "there is no file"),
        (None, "no test is named"),
    ],
)
def test_an_entry_that_is_wrong_is_found(test, wrong):
    (problem,) = problems("Pulls never wait", [] if test is None else [test])
    assert wrong in problem
