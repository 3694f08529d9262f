"""docs/reference/promises.md: each sentence it quotes is on its page, and `make test` runs the tests it names."""

import re
from functools import cache
from pathlib import Path

import pytest

from conftest import ROOT, TESTS

PAGE = ROOT / "docs" / "reference" / "promises.md"
#: Pages each of which has a section: those with guarantees on which users rely.
PAGES = ["README.md", "server.md", "threads.md", "store.md", "exactness.md", "codecs.md", "trust.md", "use-it.md"]
TEST = r"def (test_\w+)"
#: A test that is only for `make soak`.
SOAK = r"@pytest\.mark\.soak\n(?:[@ )\]].*\n)*" + TEST


@cache
def words(file: Path) -> str:
    """The text of a page on one line, without Markdown's emphasis, links and escapes."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", file.read_text(encoding="utf-8"))
    return " ".join(re.sub(r"\*\*|\\(?=\|)", "", text).split())


@cache
def suite(file: Path) -> set[str]:
    """The names of the tests of a file that `make test` runs."""
    source = file.read_text(encoding="utf-8")
    return {*re.findall(TEST, source)} - {*re.findall(SOAK, source)}


def lines() -> list[tuple[str, str, list[str]]]:
    """Each promise of the page: the file that makes it, its words, and the tests named for it."""
    entries, file = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if title := re.fullmatch(r"## \[.+\]\((.+)\)", line):
            file = title[1]
        elif file and line.startswith("| ") and line != "| promise | test |":
            promise, tests = re.split(r" (?<!\\)\| ?", line[2:])[:2]
            entries.append((file, promise.replace("\\|", "|"), re.findall(r"`([^`]+)`", tests)))
    return entries


def problems(file: str, promise: str, tests: list[str]) -> list[str]:
    """What is wrong with a line of the page."""
    wrong = [] if promise in words(PAGE.parent / file) else [f"{file} no longer says: {promise}"]
    wrong += [] if tests else [f"no test is named for: {promise}"]
    for test in tests:
        path, _, name = test.partition("::")
        if not (TESTS / path).is_file():
            wrong.append(f"there is no file tests/{path}")
        elif name not in suite(TESTS / path):
            wrong.append(f"tests/{path} has no {name} that `make test` runs")
    return wrong


def test_each_promise_stands_on_its_page_and_has_a_test():
    entries = lines()
    assert list(dict.fromkeys(Path(file).name for file, *_ in entries)) == PAGES
    assert len(set(entry[:2] for entry in entries)) == len(entries) > 200
    assert [wrong for entry in entries for wrong in problems(*entry)] == []


SOAKED = "engine/test_codecs.py::test_the_bound_of_rotated_errors_is_that_of_a_linear_program"


@pytest.mark.parametrize(
    ("promise", "test", "wrong"),
    [
        ("Pulls never wait", "server/test_flush_after.py::test_nothing_of_this_name", "has no test_nothing"),
        (
            "Pulls never wait",
            "engine/test_codecs.py::test_the_bound_of_rotated_errors_is_that_of_a_linear_program",
            "has",
        ),
        ("Pulls never wait", "server/test_no_file.py::test_a", "there is no file"),
        ("Pulls never wait", None, "no test is named"),
        ("Pulls always wait", "server/test_memory.py::test_peak_resident_memory", "no longer says"),
    ],
)
def test_a_line_that_is_wrong_is_found(promise, test, wrong):
    (problem,) = problems("../guides/threads.md", promise, [] if test is None else [test])
    assert wrong in problem
