"""The count of local names (.ci/names), which `make lint` holds to the limits of pyproject.toml."""

import pytest

from scripts import script

PYTHON = """
def outer(self, argument, *rest, **options):
    total: int = 0
    for key, (low, high) in options.items():
        total += key
    with open(key) as file, suppress(OSError):
        rows = [row for row in file if (size := len(row))]
    def inner(total): return lambda argument: argument
    class Holder:
        field = 1
    try: del rows
    except OSError as error: self.attribute = error
module = 1
"""
CPP = """
#include "x.hpp"
// const int comment = 1;
template <class T>
std::map<int, T> function(const Array& values, T* out, std::size_t count) {
  const auto& [first, second] = pair(values);
  for (const auto& row : rows_of("int text = 1;")) *out = count * row;
  std::vector<int> lengths;
  product = factor * other;
  throw error;
  return lengths;
}
"""


@pytest.fixture(scope="module")
def names():
    return script("names")


def test_python_names_are_counted_once_for_each_function(names):
    counted = " ".join(name for name, _ in names.names_of_python(PYTHON))
    assert counted == "argument rest options total key low high file rows row size total argument error"


def test_cpp_declarations_are_counted(names):
    lines = dict(names.names_of_cpp(CPP))
    assert " ".join(sorted(lines)) == "count first lengths out row second values"
    assert lines["lengths"] == 8


def test_the_last_word_makes_a_filler(names):
    fillers = {"found", "left"}
    assert [names.is_filler(name, fillers) for name in ("found", "rows_found", "found_")] == [True] * 3
    assert [names.is_filler(name, fillers) for name in ("found_rows", "is_left", "row")] == [False] * 3


def test_a_name_stands_for_one_class_or_type(names, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "ROOT", tmp_path)
    (tmp_path / "python").mkdir()
    for name, own in (("one", "class Row: pass\nSlot = Any"), ("two", "Row = dict\nSlot = Any\nKind = one.Kind")):
        (tmp_path / "python" / f"{name}.py").write_text(f"{own}\nclass Task: x = {name!r}\n")
    assert names.types_with_two_meanings({"Task": "public"}) == ["Row is in python/one.py and python/two.py"]
