"""The lines that `make mutants` breaks are still there (running the mutants takes minutes)."""

import pytest

import mutants
from conftest import check_error


@pytest.fixture(scope="module")
def texts():
    return mutants.sources(mutants.ROOT)


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_line_to_break_stands_once(name, texts):
    old, new, tests = mutants.MUTANTS[name]
    assert mutants.place(texts, old, name).is_file()
    assert old != new
    assert mutants.find_test(mutants.ROOT, tests).is_file()


def test_a_line_that_stands_twice_or_nowhere_is_refused(tmp_path):
    once, twice = {tmp_path / "a.py": "x = 1\n"}, {tmp_path / "a.py": "x = 1\n", tmp_path / "b.py": "x = 1\n"}
    assert mutants.place(once, "x = 1") == tmp_path / "a.py"
    for texts in (twice, {}, {tmp_path / "a.py": "x = 1\nx = 1\n"}):
        check_error(r"stands [02] times", mutants.place, texts, "x = 1", error=LookupError)
    check_error("there are 0 test files", mutants.find_test, tmp_path, "test_ops.py", error=LookupError)
