"""Normal noise: ChaCha20 of RFC 8439, normals within a few ulp of 50 digits, and the same bits however it is drawn."""

import math
import os
import shutil
from dataclasses import dataclass, field
from itertools import pairwise as neighbours

import numpy as np
import pytest

import noise as model
import oracle
from afflux import ops
from builds import once, run
from conftest import ISAS, ROOT, THREADS, bits, check_error, found
from pairwise import pairwise
from test_types import buffer, values

CXX = shutil.which(os.environ.get("CXX", "c++"))
KEY, NONCE = bytes(range(1, 33)), bytes.fromhex("000000090000004a00000000")
MOST = 2**32 // 48 * 512
#: RFC 8439, 2.3.2 and A.1: key, nonce, number and block.
ZEROS, ONE = bytes(32), bytes(31) + b"\1"
VECTORS = [
    (bytes(range(32)), NONCE, 1, "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
     "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    (ZEROS, bytes(12), 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
     "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (ZEROS, bytes(12), 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
     "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    (ONE, bytes(12), 1, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
     "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    (b"\0\xff" + bytes(30), bytes(12), 2, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
     "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
    (ZEROS, bytes(11) + b"\2", 0, "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
     "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
]  # fmt: skip


def z(size, first=0, sigma=1.0, dtype="float64", threads=1, nonce=NONCE):
    """sigma z, without anything else."""
    out = np.empty(size, dtype)
    combine = ops.Combine([], np.zeros(0), noise=ops.Noise(sigma, KEY, nonce, first))
    ops.apply(ops.Pass(np.zeros(size, dtype), out, combine), num_threads=threads)
    return out


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if CXX is None:
        pytest.skip("no C++ compiler is installed")

    def compile_it(folder):
        files = [f"-I{ROOT / 'engine'}", f"-I{ROOT / 'engine' / 'include'}", found("noise") / "main.cpp"]
        run(CXX, "-std=c++17", "-O1", "-ffp-contract=off", *files, "-o", folder / "noise")

    return once(tmp_path_factory, "noise", compile_it) / "noise"


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_chacha20_gives_the_blocks_of_rfc_8439(program, vector):
    key, nonce, number, block = vector
    assert model.chacha20(key, nonce, [number])[0].astype("<u4").tobytes().hex() == block
    words = [f"{word:x}" for word in np.frombuffer(key + nonce, "<u4").tolist()]
    printed = np.array([int(word, 16) for word in run(program, *words, f"{number:x}").split()], "<u4")
    assert printed.tobytes().hex() == block


@pytest.mark.parametrize("count", [3000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_normals_are_those_of_50_digits(rng, program, tmp_path, count):
    """At random bits, and at all ends: the error is below 5 roundings of each value."""
    ends = [0, 1, 2**11, 2**63, 2**64 - 1, 2**64 - 2**11, 2**64 - 2**12, 0xB504F333F9DE6400, 3037000500 << 32]
    turns = [0, 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 3 << 30, (3 << 30) - 1, 2**32 - 1, 2**29, 2**29 - 1]
    radius = [end for end in ends for _ in turns] + rng.integers(0, 2**64, count, np.uint64).tolist()
    small = rng.integers(0, 64, count)  # u of all sizes
    radius[-count // 3 :] = [r >> int(k) for r, k in zip(radius[-count // 3 :], small, strict=False)]
    angle = turns * len(ends) + rng.integers(0, 2**32, count).tolist()
    (tmp_path / "bits").write_text("\n".join(f"{r:x} {a:x}" for r, a in zip(radius, angle, strict=True)))
    printed = [float.fromhex(word) for word in run(program, tmp_path / "bits").split()]
    pairs = model.normals(np.array(radius, np.uint64), np.array(angle, np.uint64))
    assert bits(np.array(printed)) == bits(np.array(pairs).T.ravel())
    worst = 0.0
    for k, (r, a) in enumerate(zip(radius, angle, strict=True)):
        for value, exact in zip(printed[2 * k : 2 * k + 2], model.exact_normals(r, a), strict=True):
            assert abs(value) < 8.58
            worst = max(worst, float(abs(model.Decimal(value) - exact)) / max(abs(float(exact)), 5e-324))
    assert 1 < worst / oracle.EPS < 5


@pairwise(
    "size, first, dtype, threads", [1, 511, 512, 1025, 70_001], [0, 1, 513, 65536, MOST - 70_001],
    ["float32", "float64"], THREADS,
)  # fmt: skip
def test_the_bits_are_those_of_the_formula(size, first, dtype, threads):
    expected = (0.7 * model.noise(KEY, NONCE, size, first)).astype(dtype)
    chosen = next(backend.name for backend in ops.backends() if backend.chosen)
    try:
        for isa in ISAS:
            ops.choose_isa(isa)
            assert bits(z(size, first, 0.7, dtype, threads)) == bits(expected), isa
    finally:
        ops.choose_isa(chosen)


@pytest.mark.parametrize("updates", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("trim", [0.0, 0.2])
def test_with_the_other_stages(isa, rng, updates, kind, trim):
    """It is the last term of the direction and of new rule vectors, also of one whose row of `next` is 1 at itself;
    trees are read in place.
    """
    size, count = 4099, 7
    arrays = [buffer(updates, rng.standard_normal(size).astype("float64" if updates == "float64" else "float32"))
              for _ in range(count)]  # fmt: skip
    vectors, weights = [np.asarray(values(array)) for array in arrays], rng.random(count)
    params, held = rng.standard_normal(size), [rng.standard_normal(size) for _ in range(3)]
    coefficients, in_noise = rng.standard_normal((3, 3 + count)), np.array([0.4, -1.3, 0.0])
    coefficients[1:] = np.eye(3, 3 + count)[1:]
    drawn = model.noise(KEY, NONCE, size, 100)
    states = [np.zeros(size), np.zeros(size)] if kind == "adam" else []
    v, _ = oracle.direction(params, vectors, weights.tolist(), 0.25, (held, [0.7, -1.1, 0.0]), trim=trim)
    v = v + 0.3 * drawn
    expected = oracle.step(kind, params, v, states, 0.3, 0.9, 0.99, 1e-3, 1.0)
    renewed = oracle.next_memories(held, vectors, coefficients)
    renewed = [sum + c * drawn if c else sum for sum, c in zip(renewed, in_noise.tolist(), strict=True)]
    borders = np.array([0, 5, 5, 700, 4096, size])
    cut = [ops.Parts([v[a:b] for a, b in neighbours(borders)], borders) for v in vectors]
    for given in (arrays, cut) if updates != "bfloat16" else (arrays,):
        out, new_states, memory = np.empty(size), [s.copy() for s in states], [m.copy() for m in held]
        kept = ops.RuleVectors(memory, np.array([0.7, -1.1, 0.0]), coefficients)
        combine = ops.Combine(given, weights, 0.25, trim=trim, noise=ops.Noise(0.3, KEY, NONCE, 100, in_noise))
        step = ops.Step(kind, 0.3, 0.9, 0.99, 1e-3)
        ops.apply(ops.Pass(params, out, combine, None, step, new_states, kept), num_threads=2)
        assert [bits(x) for x in (out, *new_states, *memory)] == [bits(x) for x in (*expected, *renewed)]


def test_parts_of_a_vector_draw_what_the_whole_one_does():
    whole, borders = z(10_000, 7), [0, 1, 513, 2048, 9999, 10_000]
    assert bits(np.concatenate([z(b - a, 7 + a) for a, b in neighbours(borders)])) == bits(whole)


def test_noise_of_sigma_0_is_none(isa, rng):
    updates, weights = [rng.standard_normal(3000).astype("float32") for _ in range(4)], rng.random(4)
    outs, following = [], rng.standard_normal((2, 6))
    for noise in (None, ops.Noise(0.0, KEY, NONCE, -1), ops.Noise(0.0, KEY, NONCE, -1, np.array([0.0, -0.0]))):
        outs.append([np.full(3000, value, "float32") for value in (0.0, 0.2, -0.3)])
        params = np.full(3000, 0.1, "float32")
        held = ops.RuleVectors(outs[-1][1:], np.ones(2), following)
        ops.apply(ops.Pass(params, outs[-1][0], ops.Combine(updates, weights, noise=noise), rule_vectors=held))
    assert len({tuple(map(bits, each)) for each in outs}) == 1


def test_rule_vectors_may_have_noise_without_the_direction(isa):
    params, vector = np.zeros(3000), np.full(3000, 0.1)
    combine = ops.Combine([], np.zeros(0), noise=ops.Noise(0.0, KEY, NONCE, 7, np.array([-0.6])))
    ops.apply(ops.Pass(params, params, combine, rule_vectors=ops.RuleVectors([vector], np.zeros(1), np.ones((1, 1)))))
    assert bits(vector) == bits(0.1 + -0.6 * model.noise(KEY, NONCE, 3000, 7))
    assert not params.any()


@pytest.mark.parametrize("count", [1 << 20, pytest.param(100_000_000, marks=pytest.mark.soak)])
def test_moments_and_tails(count):
    """Each of these statistics of independent normals is beyond its bound with a probability below 1e-6."""
    sums, beyond, products, seen = np.zeros(4), np.zeros(5), np.zeros(3), 0
    while seen < count:
        part = z(min(1 << 20, count - seen), seen, threads=2)
        sums += [np.sum(part**k) for k in range(1, 5)]
        beyond += [np.count_nonzero(np.abs(part) > k) for k in range(1, 6)]
        products += [np.dot(part[:-k], part[k:]) for k in (1, 16, 256)]
        seen += len(part)
    # Of the powers of a normal: their means, and the variances of these.
    for total, mean, variance in zip(sums, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(total - seen * mean) < 5 * math.sqrt(seen * variance)
    for k, number in enumerate(beyond.tolist(), 1):
        expected = seen * math.erfc(k / math.sqrt(2))
        assert abs(number - expected) < 5 * math.sqrt(expected) + 12  # also of few
    assert np.all(np.abs(products) < 5 * math.sqrt(seen))


def test_another_key_nonce_or_index_is_another_normal():
    def drawn(key=KEY, nonce=NONCE, first=0):
        out = np.empty(600)
        ops.apply(ops.Pass(np.zeros(600), out, ops.Combine([], np.zeros(0), noise=ops.Noise(1.0, key, nonce, first))))
        return out

    changed = [bytes([KEY[0] ^ 1]) + KEY[1:], KEY[:-1] + bytes([KEY[-1] ^ 128])]
    others = [drawn(key) for key in changed] + [drawn(nonce=b"\1" + NONCE[1:]), drawn(nonce=NONCE[:-1] + b"\1")]
    assert len({*drawn().tolist(), *drawn(first=600).tolist(), *(x for other in others for x in other)}) == 6 * 600


@dataclass
class Case:
    text: str
    noise: object
    cached: bool = False
    following: object = field(default_factory=lambda: np.eye(1, 3))


@pytest.mark.parametrize(
    "case",
    [
        Case("noise.sigma is -0.1", ops.Noise(-0.1, KEY, NONCE)),
        Case("noise.sigma is not finite", ops.Noise(np.nan, KEY, NONCE)),
        Case("noise.sigma is not finite", ops.Noise(-np.inf, KEY, NONCE)),
        Case("noise.key must be 32 bytes", ops.Noise(0.1, KEY[1:], NONCE)),
        Case("noise.key must be 32 bytes", ops.Noise(0.1, KEY.hex(), NONCE)),
        Case("noise.nonce must be 12 bytes", ops.Noise(0.1, KEY, NONCE + b"1")),
        Case("noise.first is -1", ops.Noise(0.1, KEY, NONCE, -1)),
        Case(f"noise.first is {MOST - 2}, must be from 0 to {MOST - 3}", ops.Noise(0.1, KEY, NONCE, MOST - 2)),
        Case("noise does not go with cached rows", ops.Noise(0.1, KEY, NONCE), cached=True),
        Case("sigma", 0.1),
        Case(r"\[apply\] noise.next has 2 elements, expected 1", ops.Noise(0.1, KEY, NONCE, 0, np.ones(2))),
        Case(r"noise.next\[0\] is not finite", ops.Noise(0.0, KEY, NONCE, 0, np.full(1, np.inf))),
        Case("noise.next is for rule vectors with `next`", ops.Noise(0.1, KEY, NONCE, 0, np.ones(1)), following=None),
        Case("noise.next is float32, expected float64", ops.Noise(0.1, KEY, NONCE, 0, np.ones(1, "float32"))),
        Case("noise does not go with cached", ops.Noise(0.0, KEY, NONCE, 0, np.ones(1)), cached=True),
        Case("noise.first is -1", ops.Noise(0.0, KEY, NONCE, -1, np.ones(1))),
    ],
    ids=lambda case: case.text,
)
def test_refused(case):
    params, out = np.zeros(3), np.full(3, 7.0)
    rows = ops.CachedMean(np.zeros(3), 2, [None, None], [None, None]) if case.cached else None
    combine = ops.Combine([np.ones(3)] * 2, np.array([0.5, 0.5]), noise=case.noise)
    held = ops.RuleVectors([np.ones(3)], np.ones(1), case.following)
    error = check_error(case.text, ops.apply, ops.Pass(params, out, combine, rows, rule_vectors=held))
    assert KEY.hex()[2:] not in str(error)
    assert out.tolist() == [7.0] * 3


def test_no_key_is_printed():
    noise = ops.Noise(0.1, KEY, NONCE, 7)
    assert repr(noise) == "Noise(sigma=0.1, nonce='000000090000004a00000000', first=7, next=None)"
    shown = repr(ops.Combine([], np.zeros(0), noise=noise)), repr(noise.__rich_repr__()), f"{noise}"
    assert not any(repr(KEY)[2:-1] in text or KEY.hex() in text for text in shown)
