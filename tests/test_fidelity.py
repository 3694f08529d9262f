"""docs/reference/fidelity.md: each function that it names is there, and `make test` runs each test that it names.

CONTRIBUTING.md: so is each name in its picture of a push and a round.
"""

import re
from importlib import import_module
from operator import attrgetter

import pytest

from conftest import ROOT, TESTS, check_raises
from test_promises import suite

PAGE = ROOT / "docs" / "reference" / "fidelity.md"


def rows() -> list[list[str]]:
    """The cells of the tables, without their heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[1] != "here"]


def find(path: str) -> object:
    """The object at an import path: the longest prefix that is a module, then attributes."""
    names = path.split(".")
    for count in range(len(names), 0, -1):
        try:
            module = import_module(".".join(names[:count]))
        except ModuleNotFoundError:
            continue
        return attrgetter(".".join(names[count:]))(module) if names[count:] else module
    raise AttributeError(f"there is no {path}")


def problems(row: list[str]) -> list[str]:
    """What is wrong with a row."""
    wrong = [] if len(row) == 4 else [f"{len(row)} cells"]
    paths, tests = (re.findall(r"`([^`]+)`", cell) for cell in (row[1], row[-1]))
    wrong += [] if paths and tests else ["no function or no test is named"]
    for path in paths:
        try:
            find(path)
        except AttributeError as error:
            wrong.append(f"{path}: {error}")
    for test in tests:
        file, _, name = test.partition("::")
        if not (TESTS / file).is_file() or name not in suite(TESTS / file):
            wrong.append(f"`make test` runs no {test}")
    return wrong


def test_each_row_names_functions_and_tests_that_exist():
    assert [(row[0], wrong) for row in rows() for wrong in problems(row)] == []
    text = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^## (.+)$", text, flags=re.M)[1:]
    assert sections[::2] == ["Anarchic FL", "WKAFL", "CA²FL", "FADAS"]
    assert len(rows()) > 70
    assert re.search(r"FL-ICML.*ICLR 2024", text, re.S), "both versions of CA2FL"


GOOD = ["line 1", "`afflux.rules.rule.Rule`", "–", "`test_fidelity.py::test_a_row_that_is_wrong_is_found`"]


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (["line 1", *GOOD[:2], *GOOD[2:]], "5 cells"),
        (["line 1", "Rule", *GOOD[2:]], "no function"),
        ([*GOOD[:3], "–"], "no function or no test"),
        (["line 1", "`afflux.rules.rule.Nothing`", *GOOD[2:]], "afflux.rules.rule.Nothing"),
        ([*GOOD[:3], "`test_fidelity.py::test_nothing_of_this_name`"], "runs no test_fidelity.py::test_nothing"),
        ([*GOOD[:3], "`no_file.py::test_a`"], "runs no no_file.py"),
    ],
)
def test_a_row_that_is_wrong_is_found(row, wrong):
    assert problems(GOOD) == []
    assert wrong in problems(row)[0]


def picture(text: str) -> list[str]:
    """The names in the picture of a push and a round."""
    block = re.findall(r"^## One push and one round\n.+?^```text\n(.+?)^```", text, re.M | re.S)[0]
    return re.findall(r"\b(?:aggregation|server|store)\.[\w.]*\w", block)


def test_each_name_in_the_picture_of_a_push_and_a_round_exists():
    names = picture((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(names) > 25
    for name in names:
        find(f"afflux.{name}")
    old = "## One push and one round\n\n```text\nM  server.late.flush_late  makes a step (store.store.Store)\n```\n"
    assert picture(old) == ["server.late.flush_late", "store.store.Store"]
    check_raises(AttributeError, find, "afflux.server.late.flush_late")
