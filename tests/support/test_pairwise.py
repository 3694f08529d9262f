"""The choice of rows that stand for a product of parameters."""

from itertools import combinations, product

import pytest

from pairwise import cover, pairwise


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 3, 3), (4, 3, 2, 5, 2), (6, 1, 7)])
def test_every_pair_stands_in_a_row(sizes):
    axes = [[f"{axis}{k}" for k in range(size)] for axis, size in enumerate(sizes)]
    rows = cover(*axes)
    for i, j in combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(axes[i], axes[j]))
    assert len(set(rows)) == len(rows) <= len(list(product(*axes)))
    assert rows == cover(*axes)


def test_it_is_far_from_the_whole_product():
    axes = [range(4)] * 5
    assert len(cover(*axes)) < 32 < 4**5


@pytest.mark.parametrize("soaking", [True, False])
def test_the_other_rows_are_for_soak(soaking, monkeypatch):
    monkeypatch.setattr("pairwise.soaking", soaking)
    mark = pairwise("a, b, c", [0, 1], [0, 1], [0, 1], always=[(1, 1, 1)])
    now = [row for row in mark.args[1] if isinstance(row, tuple) and not hasattr(row, "marks")]
    soak = [row.values for row in mark.args[1] if hasattr(row, "marks")]
    assert mark.args[0] == "a, b, c"
    assert {*now, *soak} == (set(product([0, 1], repeat=3)) if soaking else set(now))
    assert {*cover([0, 1], [0, 1], [0, 1]), (1, 1, 1)} == set(now)
    assert len(now) < 8
