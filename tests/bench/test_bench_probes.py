"""What the native probes move and count, and whether the cores are shared."""

import numpy as np
import pytest

from bench.measure import native_probes
from bench.measure.native_probes import AdditionTimer, Variant, sweep
from bench.run import notes
from benching import THREADS, D, M, bench, cache  # noqa: F401

pytest.importorskip("torch")


def test_shared_cores():
    """Additions take time in proportion to their number, and there is a note if their time has varied."""
    additions = native_probes.library().afflux_additions
    few, many = (min(additions(rounds) for _ in range(9)) for rounds in (10_000, 100_000))
    assert 3 < many / few < 30
    seen = AdditionTimer([2e-5, 1e-5, 3e-5, 1.9e-5])
    assert AdditionTimer().slowdown is None
    assert seen.slowdown == pytest.approx(1.95)
    assert [
        n
        for n in notes([], [], [{"cores_of_others": 0.0, "additions_slowdown": seen.slowdown}], 20)
        if "1.9 times" in n
    ]
    assert not [n for n in notes([], [], [{"cores_of_others": 0.0, "additions_slowdown": 1.1}], 20) if "additions" in n]


VARIANTS = [Variant(0, 256, 16, False), Variant(512, 1024, 4, True)]
VARIANTS += [Variant(4096, 4096, 1, False), Variant(0, 1024, 16, True)]
#: More than one chunk of 65,536, and a tail that fills no cache line.
LENGTH = 150_001


def whole_numbers(count, size=LENGTH):
    """Sums of them are exact in float32."""
    rng = np.random.default_rng(0)
    return [rng.integers(-9, 9, size).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 11, 18])
def test_native_probes_move_what_they_say(variant, count):
    """Every word is read, added and written: nothing is optimised away."""
    vectors = whole_numbers(count + 1)
    reads = [(vector, 4) for vector in vectors[:count]]
    expected = sum(vectors[:count])
    assert sweep(reads, [], [], LENGTH, variant, threads=THREADS, laps=2)() == 2 * expected.sum(dtype=np.float64)
    out, own = np.empty(LENGTH + 3, np.float32)[3:], vectors[count].copy()
    sweep(reads, [(out, 4)], [], LENGTH, variant, threads=THREADS)()
    np.testing.assert_array_equal(out, expected)
    out[:] = 0
    sweep(reads, [(out, 4)], [(own, 4)], LENGTH, variant, threads=THREADS, laps=3)()
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(own, vectors[count] + 3 * expected)


def test_native_probes_count_parts_of_a_byte():
    """Rows of 4 bits and a pair of float32 for 128 elements: 9 words for 64 of them."""
    size, words = 64 * 2000, 9 * 2000
    own, params = whole_numbers(1, words)[0], whole_numbers(1, size)[0]
    expected = own.copy()
    for i in range(0, size, 1024):  # a tile's sum goes to the first words of the same tile
        there = expected[i * 9 // 64 : (i + 1024) * 9 // 64]
        there += params[i : i + there.size]
    sweep([(params, 4)], [], [(own, 0.5625)], size, Variant(tile=1024), threads=THREADS)()
    np.testing.assert_array_equal(own, expected)


def test_native_probes_count_two_and_eight_bytes_an_element():
    size = LENGTH - 1  # an even number: two elements of 2 bytes are a word
    double, half, out = whole_numbers(1, 2 * size)[0], whole_numbers(1, size // 2)[0], np.zeros(size, np.float32)
    total = sweep([(half, 2), (double, 8)], [], [], size, VARIANTS[0], threads=1)()
    assert total == half.sum(dtype=np.float64) + double.sum(dtype=np.float64)
    before = double.copy()
    sweep([(half, 2)], [(out, 2)], [(double, 8)], size, Variant(tile=256), threads=THREADS)()
    np.testing.assert_array_equal(out[: size // 2], half)
    assert (out[size // 2 :] == 0).all()
    tiles = [(half[128 * i : 128 * (i + 1)], slice(512 * i, 512 * i + 128)) for i in range(size // 256)]
    for part, where in tiles:  # a tile's sum goes to the first words of the same tile
        before[where] += part
    np.testing.assert_array_equal(double[: 512 * len(tiles)], before[: 512 * len(tiles)])
