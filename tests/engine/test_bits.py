"""The same bits on any thread count, instruction set and CPU, and in the caller's odd floating-point modes."""

import numpy as np
import pytest

import order
from afflux import _engine, ops
from afflux.selftest import digest
from conftest import ISAS, THREADS, awkward, found
from pairwise import soak_all
from processes import run_python
from surroundings import flushed_subnormals
from test_types import buffer, values


@pytest.fixture(scope="module")
def digests():
    """The digests of this process, one thread, best instruction set."""
    return digest.parts(1)


def digests_under(environment, *threads):
    """The digests that a fresh process computes under extra environment variables."""
    done = run_python("-m", "afflux.selftest.digest", *threads, check=True, **environment)
    lines = [line.split() for line in done.stdout.splitlines()]
    return [{part: value for t, part, value in lines if t == str(count)} for count in threads]


def test_the_bits_are_those_of_earlier_versions(digests):
    """The contract cannot be changed later: files and logs carry order_version. A new rule adds its own line."""
    changed = {part for part, value in digest.golden().items() if digests.get(part) != value}
    assert not changed, "golden.json has other digests; CONTRIBUTING.md says when it may be renewed, and how"


def test_the_order_is_as_described(isa, rng):
    assert (_engine.LANES, _engine.BLOCK, _engine.SUPERBLOCK) == (order.LANES, order.BLOCK, order.SUPERBLOCK)
    for size in (1, 31, 33, 2049, 65537, 5 * 65536 + 77):
        check_order(awkward(rng, size), awkward(rng, size))


def check_order(x, y):
    """Of sums over two vectors, by any number of threads."""
    expected = [[order.inner_product(a, b) for b in (x, y)] for a in (x, y)]
    for threads in THREADS:
        assert ops.gram([x, y], num_threads=threads).tolist() == expected
        assert ops.ingest(x, np.empty_like(x), num_threads=threads).sum_of_squares == expected[0][0]


def test_the_order_of_float64_has_rounded_products(isa, rng):
    for size in (1, 33, 2049, 2 * 65536 + 77):
        x, y = (awkward(rng, size) * (1 + 1e-9 * rng.random(size)) for _ in range(2))
        assert x.dtype == np.float64
        check_order(x, y)


def test_the_order_of_mixed_types(isa, rng):
    """Runs of one type of even and odd length, types that alternate, and more vectors than a panel holds."""
    for size, kinds in ((2049, "ffdddbbd"), (2 * 65536 + 77, "bdf"), (33, "ffb" * 23)):
        plain = [awkward(rng, size) for _ in kinds]
        vectors = [
            v if kind == "f" else v * (1 + 1e-9 * rng.random(size)) if kind == "d" else buffer("bfloat16", v)
            for v, kind in zip(plain, kinds, strict=True)
        ]
        held = [values(v) if kind == "b" else v for v, kind in zip(vectors, kinds, strict=True)]
        expected = [[order.inner_product(a, b) for b in held] for a in held]
        for threads in THREADS:
            assert ops.gram(vectors, num_threads=threads).tolist() == expected


def test_the_tree_over_more_superblocks_than_chunks(rng):
    x = awkward(rng, 131 * 65536 + 13)
    expected = order.inner_product(x, x)
    for threads in THREADS:
        assert ops.gram([x], num_threads=threads)[0, 0] == expected


@pytest.mark.parametrize("threads", [THREADS[-1], *soak_all((count,) for count in THREADS[:-1])])
def test_threads_and_instruction_sets(isa, digests, threads):
    assert digest.parts(threads) == digests


def test_the_environment_chooses(digests):
    assert digests_under({"AFFLUX_ISA": ISAS[-1]}, 2) == [digests]
    chosen = "from afflux import ops; print(*[b.name for b in ops.backends() if b.chosen])"
    for name in ISAS:
        assert run_python("-c", chosen, AFFLUX_ISA=name).stdout.strip() == name


def numpy_features():
    """What NumPy dispatches on and this CPU has: the names that it lets us switch off."""
    from numpy._core import _multiarray_umath as umath

    return [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]


GLIBC = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,-FMA,-FMA4,-BMI2,-ERMS"
WITHOUT = {
    "numpy": {"NPY_DISABLE_CPU_FEATURES": " ".join(numpy_features())},
    "openblas": {"OPENBLAS_CORETYPE": "Prescott"},
    "glibc": {"GLIBC_TUNABLES": GLIBC},
}
WITHOUT["all"] = WITHOUT["numpy"] | WITHOUT["openblas"] | WITHOUT["glibc"]


@pytest.mark.parametrize("which", ["all", *soak_all([("numpy",), ("openblas",), ("glibc",)])])
def test_other_libraries_cpu_features_do_not_matter(digests, which):
    assert digests_under(WITHOUT[which], 3) == [digests]


def test_numpys_features_are_really_off():
    """Otherwise the tests around this one would compare like with like."""
    code = "from numpy._core._multiarray_umath import __cpu_features__ as f; print(*[n for n in f if f[n]])"
    done = run_python("-c", code, check=True, **WITHOUT["numpy"])
    assert numpy_features()
    assert not set(done.stdout.split()) & set(numpy_features())


@pytest.mark.soak
@pytest.mark.parametrize("selection", ["rules", "ops server"])
def test_the_suite_passes_without_cpu_features(selection):
    suites = [found(f"test_{name}.py") for name in selection.split()]
    environment = WITHOUT["all"] | {"AFFLUX_ISA": ISAS[-1]}
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", *suites, **environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_flush_denormal_in_the_caller(digests):
    """torch's mode leaks into threads that the caller starts; the engine computes without it and puts it back."""
    import torch

    smallest = torch.tensor([1e-310], dtype=torch.float64)
    inputs, typed = digest.inputs(), digest.typed_inputs()  # NumPy itself flushes in that mode
    with flushed_subnormals():
        flushed = [digest.operations(threads, *inputs) for threads in (1, 3)]
        flushed_types = [digest.types(threads, *typed) for threads in (1, 3)]
        still_on = (smallest * 1.0).item() == 0.0
    assert flushed == [digests["operations"]] * 2
    assert flushed_types == [digests["types"]] * 2
    assert still_on


def test_sums_over_superblocks_keep_subnormals_in_the_callers_mode():
    """The root of the tree is added after the threads have ended."""
    vector, sums = np.zeros(2 * 65536 + 1), []
    vector[[0, 65536, -1]] = 1.6e-154, 1.2e-154, 1e-154  # two of the squares are subnormal
    out = np.empty_like(vector)
    for flush in (False, True):
        with flushed_subnormals(flush):
            squares = ops.ingest(vector, out).sum_of_squares
            sums.append((squares, ops.gram([vector])[0, 0], ops.inner([vector]).squares[0]))
    assert sums[0] == sums[1]
