"""Every calibration with every step and memory, in every type: equal to plain float64 arithmetic, bit for bit."""

from itertools import product

import numpy as np
import pytest

import oracle
from afflux import _engine, ops
from conftest import ISAS, bits
from order import SIZES
from pairwise import pairwise
from test_types import buffer, values

KINDS = _engine.STEP_KINDS  # how many states each keeps
CACHES = {"none": None, "difference": ops.CachedDifference, "mean": ops.CachedMean}
LR, BETA1, BETA2, EPSILON, ROOT_SCALE = -0.3, 0.9, 0.99, 1e-3, 1.25


def step_of(kind, lr=LR):
    return ops.Step(kind, lr, BETA1, BETA2, EPSILON, ROOT_SCALE)


class Round:
    """Inputs of one round, drawn once; `run` gives what the engine makes of copies of them, `expected` the oracle's."""

    def __init__(self, rng, size, params_type, updates_type, arrivals=6, held=3):
        common = rng.random(size) < 0.2  # zeros in all vectors: what comes of them has a sign too

        def draw():
            drawn = rng.standard_normal(size) * 2.0 ** rng.integers(-30, 30, size)
            return np.where(common | (rng.random(size) < 0.1), np.copysign(0.0, drawn), drawn)

        self.params_type, self.row_type = params_type, "float64" if updates_type == "float64" else "float32"
        self.params = draw().astype(params_type)
        self.updates = [buffer(updates_type, draw().astype(self.row_type)) for _ in range(arrivals)]
        self.plain = [values(update) for update in self.updates]
        self.weights = np.resize([0.5, 0.0, -0.25, 1.5, 0.3, 1e-3], arrivals)
        self.rows = [draw().astype(self.row_type) if i % 3 else None for i in range(arrivals)]
        self.replaced = [i not in (1, 4) for i in range(arrivals)]
        self.sum = draw()
        self.rule_vectors = [draw().astype(params_type) for _ in range(held)]
        self.memory_weights = np.array([0.7, 0.0, -1.1, 0.2])[:held]
        self.next = rng.standard_normal((held, held + arrivals))
        self.next[rng.random(self.next.shape) < 0.3] = 0.0
        self.next[-1] = np.eye(held + arrivals)[held - 1]  # stays
        self.next[0, 0] = 1.0
        moments = draw(), draw()
        self.states = [s.astype(params_type) for s in (draw(), *(np.where(v < 0, -v, v) for v in moments))]

    def run(self, cache, kind, memory, threads=2, lr=LR):
        """Out, states, rule vectors, sum, and the new rows."""
        out, total = np.empty_like(self.params), self.sum.copy()
        states = [s.copy() for s in self.states[: KINDS[kind]]]
        held = [m.copy() for m in self.rule_vectors]
        new = [np.empty(self.params.size, self.row_type) if r else None for r in self.replaced]
        stage = CACHES[cache] and CACHES[cache](total, 7, self.rows, new)
        coefficients = {"none": None, "read": None, "renewed": self.next}[memory]
        kept = ops.RuleVectors(held, self.memory_weights, coefficients) if memory != "none" else None
        combine = ops.Combine(self.updates, self.weights, 0.25)
        ops.apply(ops.Pass(self.params, out, combine, stage, step_of(kind, lr), states, kept), num_threads=threads)
        return [out, *states], held, total, [row for row in new if row is not None and cache != "none"]

    def expected(self, cache, kind, memory, lr=LR):
        held = (self.rule_vectors, self.memory_weights) if memory != "none" else ((), ())
        caching = None if cache == "none" else (cache, self.sum, 7, self.rows, self.replaced, 1.0)
        v, total = oracle.direction(self.params, self.plain, self.weights, 0.25, held, caching)
        moved = oracle.step(kind, self.params, v, self.states[: KINDS[kind]], lr, BETA1, BETA2, EPSILON, ROOT_SCALE)
        after = self.rule_vectors
        if memory == "renewed":
            after = oracle.next_memories(self.rule_vectors, self.plain, self.next)
        rows = [u for u, r in zip(self.plain, self.replaced, strict=True) if r and cache != "none"]
        return moved, after, self.sum if total is None else total, rows


def same(left, right):
    """Equal bits in lists of arrays, of equal types."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and bits(left) == bits(right)
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))


TYPES = (["float32", "float64"], ["float32", "float64", "bfloat16"], list(CACHES))


@pairwise("isa, params_type, updates_type, cache", ISAS, *TYPES, always=[*product(ISAS[:1], *TYPES)], indirect=["isa"])
def test_every_combination(isa, rng, params_type, updates_type, cache):
    for size in (1, 1031, 4100):
        given = Round(rng, size, params_type, updates_type)
        for kind, memory in product(KINDS, ("none", "read", "renewed")):
            assert same(given.run(cache, kind, memory), given.expected(cache, kind, memory)), (kind, memory, size)
        for kind, lr in product(KINDS, (0.0, -0.0)):
            args = cache, kind, "none"
            assert same(given.run(*args, lr=lr), given.expected(*args, lr=lr)), (kind, lr, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arrivals", [0, 1, 3, 10])
@pytest.mark.parametrize(
    "types", [("float32", "float32"), ("float64", "float64"), ("float32", "float64")], ids="-".join
)
def test_sizes(rng, size, arrivals, types):
    given = Round(rng, size, *types, arrivals)
    for cache in CACHES:
        assert same(given.run(cache, "sgd", "none"), given.expected(cache, "sgd", "none"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_rate_of_zero_keeps_its_sign(isa, kind, zero):
    """-0.0 + lr * 1 is lr, in every element: those that fill a vector, and those that are left over."""
    for size in (1, 7, 9, 13, 1031):
        params, out = np.full(size, -0.0), np.empty(size)
        states = [np.zeros(size) for _ in range(KINDS[kind])]
        combine = ops.Combine([np.ones(size)], np.ones(1))
        ops.apply(ops.Pass(params, out, combine, step=step_of(kind, zero), states=states))
        assert bits(out) == bits(np.full(size, zero))


@pytest.mark.parametrize("cache", CACHES)
def test_a_coefficient_of_zero_is_not_read(isa, rng, cache):
    """Rejected updates, and rule vectors without a part in the direction or in another memory, may hold NaN."""
    size = 3000
    given = Round(rng, size, "float32", "float32")
    clean = given.run(cache, "adam", "renewed")
    given.next[:, :] = np.where(np.arange(9) == 4, 0.0, given.next)
    given.weights[1] = 0.0  # and its row is not replaced
    given.next[0] = np.eye(9)[0]  # a memory that stays
    given.memory_weights[:] = [0.0, 0.7, -1.1]
    given.next[1:, 0] = 0.0
    given.next[1, 1] = 1.0
    assert not same(clean, given.run(cache, "adam", "renewed"))
    clean = given.run(cache, "adam", "renewed")
    given.plain[1][:] = np.nan
    given.rule_vectors[0][:] = np.nan
    poisoned = given.run(cache, "adam", "renewed")
    assert np.isnan(poisoned[1][0]).all()
    assert same((clean[0], clean[1][1:], *clean[2:]), (poisoned[0], poisoned[1][1:], *poisoned[2:]))


def test_an_update_is_read_only_for_the_sums_that_it_is_in(isa, rng):
    """The direction and a memory are summed together: NaN where one coefficient is zero reaches the other alone."""
    given = Round(rng, 3000, "float32", "float32")
    given.next = rng.standard_normal(given.next.shape)
    given.next[:, 3 + 4] = 0.0
    assert given.weights[1] == 0.0
    assert given.weights[4] != 0.0
    clean = given.run("none", "sgd", "renewed")
    finite = given.plain[1].copy()
    given.plain[1][:] = np.nan
    poisoned = given.run("none", "sgd", "renewed")
    assert same(clean[0], poisoned[0])
    assert np.isnan(poisoned[1]).all()
    given.plain[1][:] = finite
    given.plain[4][:] = np.nan
    poisoned = given.run("none", "sgd", "renewed")
    assert same(clean[1], poisoned[1])
    assert np.isnan(poisoned[0]).all()


def test_memories_that_all_stay(isa, rng):
    given = Round(rng, 3000, "float64", "bfloat16")
    given.next = np.eye(3, 9)
    assert same(given.run("none", "sgd", "renewed"), given.run("none", "sgd", "read"))


def test_the_cached_mean_reads_only_updates_whose_row_is_replaced(isa, rng):
    given = Round(rng, 3000, "float64", "float64")
    clean = given.run("mean", "sgd", "none")
    for i, replaced in enumerate(given.replaced):
        if not replaced:
            given.plain[i][:] = np.nan
    assert given.weights[4] != 0
    assert same(clean, given.run("mean", "sgd", "none"))


@pytest.mark.parametrize("kind", KINDS)
def test_in_place(isa, rng, kind):
    """Params may be out, and a row its own successor."""
    given = Round(rng, 9001, "float32", "float32", arrivals=6)
    out, _, total, rows = given.run("mean", kind, "none")
    params, states, replaced = given.params.copy(), given.states[: KINDS[kind]], given.replaced
    cached = [np.zeros(9001, np.float32) if row is None else row for row in given.rows]
    new = [row if r else None for row, r in zip(cached, replaced, strict=True)]
    stage = ops.CachedMean(given.sum, 7, cached, new)
    combine = ops.Combine(given.updates, given.weights, 0.25)
    ops.apply(ops.Pass(params, params, combine, stage, step_of(kind), states))
    assert same([[params, *states], given.sum, [row for row in new if row is not None]], [out, total, rows])


@pytest.mark.parametrize("memory", ["none", "read", "renewed"])
def test_many_updates(isa, rng, memory):
    """Long tiles without, short ones with new rule_vectors."""
    given = Round(rng, 9001, "float32", "bfloat16", arrivals=6, held=4)
    for name in ("updates", "plain", "rows", "replaced"):
        setattr(given, name, getattr(given, name) * 12)
    given.weights = np.tile(given.weights, 12)
    given.next = np.concatenate([given.next[:, :4], np.tile(given.next[:, 4:], 12)], axis=1)
    assert same(given.run("none", "yogi", memory, threads=3), given.expected("none", "yogi", memory))


def test_many_updates_in_all_sums(isa, rng):
    """More than are read side by side."""
    given = Round(rng, 5000, "float32", "float32", arrivals=6, held=2)
    given.updates, given.plain = given.updates * 7, given.plain * 7
    given.weights, given.next = rng.standard_normal(42), rng.standard_normal((2, 44))
    for name in ("rows", "replaced"):
        setattr(given, name, getattr(given, name) * 7)
    assert same(given.run("none", "sgd", "renewed"), given.expected("none", "sgd", "renewed"))
