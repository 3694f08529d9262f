"""`apply` with outputs of their own for sum, states and rule vectors: the bits of a sweep in place."""

from itertools import islice

import numpy as np
import pytest
from msgspec.structs import replace

from afflux import ops
from afflux.ops import codecs
from conftest import ISAS, awkward, bits, check_error
from pairwise import pairwise

STEPS = {
    0: ops.Step("sgd", 0.5),
    1: ops.Step("momentum", 0.5, 0.9),
    2: ops.Step("yogi", 0.1, 0.9, 0.99, 1e-3),
    3: ops.Step("amsgrad", 0.1, 0.9, 0.99, 1e-3),
}


def next_of(rule_vectors, arrivals):
    """The first one stays as it is, -0.0 included."""
    if not rule_vectors:
        return None
    return np.array([[1.0, 0.0, *[0.0] * arrivals], [0.5, 0.25, *np.linspace(1, 2, arrivals)]])


def a_pass(rng, size, arrivals, states, rule_vectors, stage, dtype):
    vectors = [awkward(rng, size).astype(dtype) for _ in range(arrivals)]
    held = [awkward(rng, size).astype(dtype) for _ in range(rule_vectors)]
    cache = None
    if stage is not None:
        rows = [None if i % 3 == 1 else awkward(rng, size).astype(dtype) for i in range(arrivals)]
        new = [None if i % 4 == 3 else np.empty(size, dtype) for i in range(arrivals)]
        cache = stage(rng.standard_normal(size), 7, rows, new)
    return ops.Pass(
        awkward(rng, size).astype(dtype),
        np.empty(size, dtype),
        ops.Combine(vectors, np.linspace(0, 1, arrivals)),
        cache,
        STEPS[states],
        [np.abs(awkward(rng, size)).astype(dtype) for _ in range(states)],
        ops.RuleVectors(held, np.ones(rule_vectors), next_of(rule_vectors, arrivals)) if rule_vectors else None,
    )


def copied(arrays):
    return [array.copy() for array in arrays]


@pairwise(
    "isa, size, arrivals, parts, dtype",
    ISAS,
    [1, 33, 5000, 70_001],
    [0, 1, 5, 17, 40],
    [(3, 2, None), (2, 0, ops.CachedDifference), (1, 2, ops.CachedMean), (0, 0, ops.CachedDifference)],
    [np.float32, np.float64],
    indirect=["isa"],
)
def test_outs_have_the_bits_of_the_sweep_in_place(isa, rng, size, arrivals, parts, dtype):
    states, rule_vectors, stage = parts
    apart = a_pass(rng, size, arrivals, states, rule_vectors, stage, dtype)
    vectors = apart.rule_vectors.vectors if rule_vectors else []
    sums = [apart.calibrate.sum] if stage else []
    read = [*sums, *apart.states, *vectors]
    before = copied(read)
    # In place first, on copies.
    new_rows = [None if row is None else np.empty_like(row) for row in apart.calibrate.new_rows] if stage else []
    here = replace(
        apart,
        out=np.empty_like(apart.out),
        calibrate=stage and replace(apart.calibrate, sum=sums[0].copy(), new_rows=new_rows),
        states=copied(apart.states),
        rule_vectors=replace(apart.rule_vectors, vectors=copied(vectors)) if rule_vectors else None,
    )
    ops.apply(here)
    nan = [np.full_like(array, np.nan) for array in read]
    outs = iter(nan)
    apart = replace(
        apart,
        calibrate=stage and replace(apart.calibrate, sum_out=next(outs)),
        states_out=[next(outs) for _ in range(states)],
        rule_vectors=replace(apart.rule_vectors, outs=list(islice(outs, rule_vectors))) if rule_vectors else None,
    )
    for array in read:
        array.flags.writeable = False
    ops.apply(apart, num_threads=2)
    assert bits(apart.out) == bits(here.out)
    own = here.rule_vectors.vectors if rule_vectors else []
    expected = [*([here.calibrate.sum] if stage else []), *here.states, *own]
    for got, want in zip(nan, expected, strict=True):
        assert bits(got) == bits(want)
    for array, was in zip(read, before, strict=True):
        assert bits(array) == bits(was)
    for one, other in zip(new_rows, apart.calibrate.new_rows if stage else [], strict=True):
        assert (one is None and other is None) or bits(one) == bits(other)


def test_an_out_may_be_what_it_comes_from(rng):
    first, second = (a_pass(np.random.default_rng(3), 300, 4, 2, 2, ops.CachedMean, np.float32) for _ in range(2))
    ops.apply(first)
    stage, own = second.calibrate, second.rule_vectors
    in_place = replace(second, calibrate=replace(stage, sum_out=stage.sum), states_out=second.states)
    ops.apply(replace(in_place, rule_vectors=replace(own, outs=own.vectors)))
    assert bits(first.out) == bits(second.out)
    assert bits(first.calibrate.sum) == bits(stage.sum)
    for one, other in zip((*first.states, *first.rule_vectors.vectors), (*second.states, *own.vectors), strict=True):
        assert bits(one) == bits(other)


def test_outs_that_do_not_fit_are_refused(rng):
    good = a_pass(rng, 50, 3, 2, 2, ops.CachedDifference, np.float32)
    states, stage, own = good.states, good.calibrate, good.rule_vectors
    short = np.zeros(49, np.float32)

    def other():
        return np.zeros(50, np.float32)

    cases = [
        (replace(good, states_out=[other()]), "states_out has 1 vectors, states has 2"),
        (replace(good, states_out=[other(), short]), r"states_out\[1\] has 49 elements, expected 50"),
        (replace(good, states_out=states[::-1]), "overlap in memory"),
        (replace(good, calibrate=replace(stage, sum_out=np.zeros(49))), "sum_out has 49 elements, expected 50"),
        (replace(good, calibrate=replace(stage, sum_out=other())), "sum_out is float32, expected float64"),
        (replace(good, rule_vectors=replace(own, outs=[other()])), "rule_vectors.outs has 1 vectors"),
        (replace(good, rule_vectors=replace(own, outs=[other(), good.out])), "overlap in memory"),
    ]
    for wrong, message in cases:
        check_error(message, ops.apply, wrong)


@pytest.mark.parametrize("stage", [ops.CachedDifference, ops.CachedMean])
@pytest.mark.parametrize(
    "codec", [codecs.affine(4), codecs.affine(8, scope="vector"), codecs.rotated(2), codecs.float16]
)
@pytest.mark.parametrize("size", [33, 5000, 70_001])
def test_the_sum_of_coded_rows_goes_elsewhere(isa, rng, size, codec, stage):
    vectors, total = [rng.standard_normal(size).astype(np.float32) for _ in range(5)], rng.standard_normal(size)
    facts = [ops.RowFacts(key, -9.0, 9.0) for key in range(5)]
    results = []
    for apart in (False, True):
        rows = [np.zeros(codec.row_bytes(size), np.uint8) if i % 2 else None for i in range(5)]
        before, sum_out, out = total.copy(), np.full(size, np.nan) if apart else None, np.empty(size, np.float32)
        cache = stage(before, 7, [None] * 5, rows, codec, facts, sum_out=sum_out)
        ops.apply(ops.Pass(vectors[0], out, ops.Combine(vectors, np.full(5, 0.2)), cache), num_threads=2)
        assert not apart or bits(before) == bits(total)
        results.append([bits(out), bits(before if sum_out is None else sum_out), *(bits(row) for row in rows[1::2])])
    assert results[0] == results[1]
