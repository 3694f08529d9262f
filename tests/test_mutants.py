"""The lines that `make mutants` breaks are still there (running the mutants takes minutes)."""

import pytest

import mutants


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_line_to_break_stands_once(name):
    file, old, new, tests = mutants.MUTANTS[name]
    assert (mutants.ROOT / file).read_text().count(old) == 1
    assert old != new
    assert (mutants.ROOT / "tests" / tests).is_file()
