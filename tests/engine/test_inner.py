"""ops.inner against the order of sums spelled out, bit for bit, and what it refuses."""

import numpy as np
import pytest

import order
from afflux import _engine, ops
from conftest import awkward, bits, check_error

SIZES = [0, 1, 31, 33, 129, 2049, 65537, 2 * 65536 + 77]
THREADS = [1, 2, 3]


def stored(values, kind):
    """(the vector as an argument, its values in float64)"""
    if kind == "bfloat16":
        buffer = _engine.Buffer(_engine.Pool(values.size, kind, 1))
        ops.ingest(values, buffer)
        return buffer, (np.asarray(buffer).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    array = values.astype(kind) if kind == "float32" else values * (1 + 1e-9)
    return array, array.astype(np.float64)


def drawn(rng, size, kinds):
    """Vectors of these kinds, and what they hold."""
    return zip(*[stored(awkward(rng, size), kind) for kind in kinds], strict=True)


def expected(vectors, weights, memory, shift, memory_weight):
    """In plain NumPy: each product is rounded before it is added, each sum is in the fixed order."""
    moved = [v + shift * memory if shift else v for v in vectors]
    squares = [order.tree_sum(x * x) for x in moved]
    if weights is None:
        return squares, None, 0.0
    e = np.zeros(vectors[0].size)
    if memory_weight:
        e = e + memory_weight * memory
    for weight, x in zip(weights, moved, strict=True):
        if weight:
            e = e + weight * x
    return squares, [order.tree_sum(x * e) for x in moved], order.tree_sum(e * e)


def same(found, wanted):
    squares, products, square = wanted
    assert bits(found.squares) == bits(np.array(squares))
    assert (found.products is None) == (products is None)
    assert products is None or bits(found.products) == bits(np.array(products))
    assert bits(np.array(found.square)) == bits(np.array(square))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kinds", "memory_kind"),
    [
        (["float32"] * 4, "float32"),
        (["bfloat16"] * 3, "float32"),
        (["float32", "float64", "bfloat16", "bfloat16", "float32"], "bfloat16"),
        (["float64"], "float64"),
    ],
    ids=["float32", "bfloat16", "mixed", "float64"],
)
def test_bits(isa, rng, size, kinds, memory_kind):
    given, held = drawn(rng, size, kinds)
    memory, memory_held = stored(awkward(rng, size), memory_kind)
    weights = rng.standard_normal(len(kinds))
    weights[0] = 0.0 if len(kinds) > 1 else 1.0
    for some, shift, own in [(weights, 0.3, 0.0), (weights, 0.0, -1.5), (None, -0.7, 0.0), (weights, 0.1, 0.25)]:
        wanted = expected(held, some, memory_held, shift, own)
        for threads in THREADS:
            found = ops.inner(given, some, memory=memory, shift=shift, memory_weight=own, num_threads=threads)
            same(found, wanted)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [*range(1, 18), 40])
def test_stages_in_registers_and_in_tiles(isa, policy_after, rng, count, kind):
    """Up to 16 vectors of one type are fused in registers: three blocks, the last with a run cut short and a tail."""
    given, held = drawn(rng, 2 * 2048 + 777, [kind] * count)
    memory = awkward(rng, held[0].size)
    weights = rng.standard_normal(count)
    for shift in (0.0, 0.3):
        wanted = expected(held, weights, memory.astype(np.float64), shift, 0.0)
        for policy in ("stages=fused", "stages=tiled"):
            ops.choose_policy(policy)
            same(ops.inner(given, weights, memory=memory, shift=shift, num_threads=2), wanted)


@pytest.mark.parametrize("memory_kind", ["bfloat16", "float64"])
def test_a_memory_of_another_type(isa, rng, memory_kind):
    given, held = drawn(rng, 2500, ["float32"] * 3)
    memory, memory_held = stored(awkward(rng, 2500), memory_kind)
    weights = rng.standard_normal(3)
    wanted = expected(held, weights, memory_held, 0.3, 0.0)
    same(ops.inner(given, weights, memory=memory, shift=0.3), wanted)


def test_squares_are_those_of_ingest(isa, rng):
    vector = awkward(rng, 70_001)
    squares = ops.ingest(vector, np.empty_like(vector)).sum_of_squares
    assert ops.inner([vector]).squares.tolist() == [squares]
    assert ops.inner([vector]).products is None


@pytest.mark.parametrize("policy", ["prefetch=0", "prefetch=64", "prefetch=8192", "stages=tiled"])
def test_no_bit_depends_on_the_policy(policy, policy_after, rng):
    given, _ = drawn(rng, 70_001, ["float32"] * 3)
    weights = np.array([0.5, -1.0, 0.25])
    plain = ops.inner(given, weights, memory=given[0], shift=0.5)
    ops.choose_policy(policy)
    same(ops.inner(given, weights, memory=given[0], shift=0.5), (plain[0].tolist(), plain[1].tolist(), plain[2]))


def test_what_is_small_beside_its_parts_is_kept(rng):
    """Vectors that nearly cancel the memory: through a Gram matrix, 1e-16 of |g|^2 is 1 per cent of what is left."""
    memory, left = rng.standard_normal((2, 100_000)).astype(np.float32)
    vectors = [(-memory * np.float32(0.5) + np.float32(1e-7) * k * left).astype(np.float32) for k in (1, 3)]
    weights = np.array([0.25, 0.75])
    found = ops.inner(vectors, weights, memory=memory, shift=0.5)
    x = [v.astype(np.longdouble) + np.longdouble(0.5) * memory for v in vectors]
    e = 0.25 * x[0] + 0.75 * x[1]
    for k in range(2):
        exact = x[k] @ e / np.sqrt((x[k] @ x[k]) * (e @ e))
        cosine = found.products[k] / np.sqrt(found.squares[k] * found.square)
        assert abs(float(cosine - exact)) < 1e-13


def test_a_vector_of_weight_0_is_no_part_of_the_sum():
    ones, bad = np.ones(50, np.float32), np.full(50, np.nan, np.float32)
    found = ops.inner([ones, bad], np.array([2.0, 0.0]))
    assert found.square == 200.0
    assert found.products[0] == 100.0
    assert np.isnan(found.products[1])


def test_a_memory_that_nothing_asks_for_is_not_read():
    ones, bad = np.ones(50, np.float32), np.full(50, np.nan, np.float32)
    assert ops.inner([ones], np.array([1.0]), memory=bad).square == 50.0


def test_nothing_is_given():
    found = ops.inner([], np.array([]))
    assert (found.squares.shape, found.products.shape, found.square) == ((0,), (0,), 0.0)
    assert bits(ops.inner([np.empty(0, np.float32)]).squares) == bits(np.zeros(1))


ONES = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([ONES, ONES[:7]],), {}, r"\[inner\] vectors\[1\] has 7 elements, expected 8"),
        (([ONES.astype(np.float16)],), {}, r"vectors\[0\] is float16, expected float32, float64 or bfloat16"),
        (([ONES], np.ones(2)), {}, "weights has 2 entries, expected 1"),
        (([ONES], np.array([np.nan])), {}, r"weights\[0\] is not finite"),
        (([ONES], np.ones(1, np.float32)), {}, "weights .*float64"),
        (([ONES],), {"shift": 0.5}, "memory is missing"),
        (([ONES], np.ones(1)), {"memory_weight": 1.0}, "memory is missing"),
        (([ONES],), {"memory": ONES, "memory_weight": 1.0}, "memory_weight asks for a sum, which takes weights"),
        (([], np.array([])), {"memory": ONES, "memory_weight": 1.0}, "asks for a sum, and vectors is empty"),
        (([ONES],), {"memory": ONES[:3], "shift": 1.0}, "memory has 3 elements, expected 8"),
        (([ONES],), {"memory": ONES, "shift": np.inf}, "shift is not finite"),
        (([ONES],), {"shift": "much"}, "shift"),
        (([ONES],), {"num_threads": 0}, "num_threads is 0"),
        ((3,), {}, "vectors cannot be read"),
    ],
)
def test_refuses(arguments, options, message):
    check_error(message, ops.inner, *arguments, **options)
