"""Normal noise: ChaCha20 of RFC 8439 in NumPy, the transform in plain float64, and the same in 50 digits."""

from decimal import Decimal, localcontext

import numpy as np

GROUP, BLOCKS, SET = 512, 48, 16
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def chacha20(key, nonce, numbers):
    """The 16 words of each block (RFC 8439, 2.3); key and nonce are bytes."""
    numbers = np.asarray(numbers, np.uint32)
    fixed = np.frombuffer(b"expand 32-byte k" + key, "<u4"), np.frombuffer(nonce, "<u4")
    first = [np.full(len(numbers), word, np.uint32) for words in fixed for word in words]
    first.insert(12, numbers)
    x = [*first]

    def turn(a, b, c, d):
        for one, other, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[one] = x[one] + x[other]
            word = x[mixed] ^ x[one]
            x[mixed] = word << np.uint32(bits) | word >> np.uint32(32 - bits)

    for _ in range(10):
        for k in range(4):
            turn(k, k + 4, k + 8, k + 12)
        for k in range(4):
            turn(k, (k + 1) % 4 + 4, (k + 2) % 4 + 8, (k + 3) % 4 + 12)
    return np.array([word + start for word, start in zip(x, first, strict=True)]).T


def random_bits(key, nonce, first, size):
    """Of each element: the 64 bits of the radius, the 32 of the angle, and whether it is the second of its pair."""
    groups = np.arange(first // GROUP, -(-(first + size) // GROUP))
    words = chacha20(key, nonce, (groups[:, None] * BLOCKS + np.arange(BLOCKS)).ravel() % 2**32)
    # In a set, word k of block b has the place 16 k + b.
    places = words.reshape(len(groups), 3, SET, 16).transpose(0, 1, 3, 2).reshape(len(groups), 3, 256).astype(np.uint64)
    pair = np.arange(GROUP // 2)
    lane, half = pair % 128, pair // 128
    radius = places[:, half, 2 * lane] | places[:, half, 2 * lane + 1] << np.uint64(32)
    angle = places[:, 2, 2 * lane + half]
    chosen = slice(first % GROUP, first % GROUP + size)
    twice = [np.concatenate([bits, bits], axis=1).ravel()[chosen] for bits in (radius, angle)]
    return *twice, np.tile(np.arange(GROUP) >= GROUP // 2, len(groups))[chosen]


def logarithm(x):
    """Of normal numbers."""
    m, k = np.frexp(x)
    below = m < float.fromhex("0x1.6A09E667F3BCDp-1")
    m, k = np.where(below, 2 * m, m), np.where(below, k - 1, k)
    s = (m - 1) / (m + 1)
    q, series = s * s, 2 / 19
    for n in range(17, 0, -2):
        series = series * q + 2 / n
    return k * 0.6931471805599453 + series * s


def polynomial(x, factorials):
    """1 - x^2/f_0 + x^4/f_1 - ..., the last term first."""
    result = (-1.0) ** len(factorials) / factorials[-1]
    for k in range(len(factorials) - 1, 0, -1):
        result = result * x + (-1.0) ** k / factorials[k - 1]
    return result * x + 1


SINE = [6.0, 120.0, 5040.0, 362880.0, 39916800.0, 6227020800.0, 1307674368000.0]
COSINE = [2.0, 24.0, 720.0, 40320.0, 3628800.0, 479001600.0, 87178291200.0, 20922789888000.0]


def parts_of(radius, angle):
    """k of u = k 2^-53; the sign and the exchange; x as an odd number of pi / 4 / 2^41."""
    turn = angle << np.uint64(11) | radius & np.uint64(2047)
    offset = (2 * (turn % np.uint64(2**41)) + np.uint64(1)).astype(np.int64) - 2**41
    return (radius >> np.uint64(11)) + np.uint64(1), turn >> np.uint64(42) == 1, turn >> np.uint64(41) & 1 == 1, offset


def normals(radius, angle):
    """Both elements of each pair."""
    count, negative, exchanged, offset = parts_of(radius, angle)
    r = np.sqrt(logarithm(count * 2.0**-53) * -2)
    x = offset * (0.7853981633974483 * 2.0**-41)
    q = x * x
    sine, cosine = polynomial(q, SINE) * x * r, polynomial(q, COSINE) * r
    cosine = np.where(negative, -cosine, cosine)
    return np.where(exchanged, sine, cosine), np.where(exchanged, cosine, sine)


def exact_normals(radius, angle):
    """One pair in 50 digits."""
    count, negative, exchanged, offset = (int(part[0]) for part in parts_of(*np.array([[radius], [angle]], np.uint64)))
    with localcontext() as context:
        context.prec = 60
        r = (-2 * (Decimal(count) / 2**53).ln()).sqrt()
        x = offset * PI / 4 / 2**41
        sine, cosine, term = Decimal(0), Decimal(0), Decimal(1)
        for n in range(0, 60, 2):
            cosine, term = cosine + term, term * x / (n + 1)
            sine, term = sine + term, -term * x / (n + 2)
        cosine = -cosine if negative else cosine
        pair = (sine, cosine) if exchanged else (cosine, sine)
        return tuple(r * value for value in pair)


def noise(key, nonce, size, first=0):
    """z."""
    radius, angle, second = random_bits(key, nonce, first, size)
    pair = normals(radius, angle)
    return np.where(second, pair[1], pair[0])


def toeplitz(sigma, weights, decays, coefficients, rounds):
    """Row t: the coefficients of each round's z in the direction of round t, with two or more rule vectors of noise.

    v_t has sigma z_t + sum_s weights[s] b_s, then b_s = decays[s] b_s + coefficients[s] z_t.
    """
    terms = [*zip(weights, decays, coefficients, strict=True)]
    return [
        [sum(w * decay ** (t - k - 1) * c for w, decay, c in terms) for k in range(t)] + [sigma] for t in range(rounds)
    ]
