"""docs/reference/codecs.md in plain NumPy: encoder and decoder of every codec, bit for bit; does not import afflux."""

import hashlib
import struct

import numpy as np

f32, f64, u32, u64 = np.float32, np.float64, np.uint32, np.uint64
BLOCK, GROUP, HEAD, LANES = 128, 2048, 64, 16
CODINGS = {"affine": 4, "affine-vector": 5, "rotated": 6}
GRID = np.dtype([("low", "<f4"), ("step", "<f4")])
LEVELS = {
    1: [0.7978845608],
    2: [0.4527800346, 1.5104176085],
    4: [0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565, 1.2562311973, 1.6180463861, 2.0690172265, 2.7325895710],
}
THRESHOLDS = {
    1: [],
    2: [0.9815988216],
    4: [0.2582216647, 0.5224037090, 0.7995497875, 1.0992858269, 1.4371387917, 1.8435318063, 2.4008033983],
}


def row_key(seed, version, client):
    if isinstance(client, str):
        who = b"s" + client.encode()
    else:
        who = b"u" + struct.pack("<Q", client) if client >= 2**63 else b"i" + struct.pack("<q", client)
    return int.from_bytes(hashlib.blake2b(struct.pack("<QQ", seed, version) + who, digest_size=8).digest(), "little")


def block_bits(key, block):
    """The low and the high 32 bits of a block."""
    mask = 2**64 - 1
    z = (key + (block + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return u32(z & 0xFFFFFFFF), u32(z >> 32)


def mixed(key, block, count):
    """32 bits for each of the first elements of a block."""
    low, high = block_bits(key, block)
    counter = low + np.arange(count, dtype=u32) * u32(0x9E3779B9)
    return (counter ^ (counter >> u32(15)) ^ high) * u32(0xD35A2D97)


def signs(key, group):
    """-1 or 1 for number i of lane l, (128, 16)."""
    bits = mixed(key, group, 64)
    bits = (bits ^ (bits >> u32(16))) * u32(0x21F0AAAD)
    words = (bits ^ (bits >> u32(15))).reshape(4, 1, LANES)
    drawn = (words >> np.arange(31, -1, -1, dtype=u32).reshape(1, 32, 1)) & u32(1)
    return np.where(drawn.reshape(BLOCK, LANES) == 1, f32(-1), f32(1))


def pack(codes, bits):
    """Codes of one block: element e in byte e mod (16 bits), from bit bits * (e div (16 bits)) on."""
    parts = codes.astype(np.uint8).reshape(8 // bits, 16 * bits)
    packed = np.zeros(16 * bits, np.uint8)
    for k, part in enumerate(parts):
        packed |= part << np.uint8(bits * k)
    return packed.tobytes()


def unpack(data, bits):
    packed = np.frombuffer(data, np.uint8)
    return np.concatenate([(packed >> np.uint8(bits * k)) & np.uint8(2**bits - 1) for k in range(8 // bits)])


def grid_over(low, high, bits):
    width = f32(high) * f32(0.5) - f32(low) * f32(0.5)
    step = width * (f32(2) / f32(2**bits - 1))
    step = min(max(step, f32(2.0**-90)), f32(2.0**119))
    step = ((step.view(u32) + u32(0x10F)) & u32(0xFFFFFF00)).view(f32)
    return min(f32(low) + f32(0), f32(2.0**126)), step


def affine_codes(x, low, step, bits, key, block):
    per_step = f32(1) / step * f32(2.0 ** (31 - bits))
    place = np.minimum((x - low) * per_step, f32(2**bits - 1) * f32(2.0 ** (31 - bits)))
    place = np.maximum(place, f32(0)).astype(u32)
    return (place + (mixed(key, block, BLOCK) >> u32(bits + 1))) >> u32(31 - bits)


def hadamard(x):
    """Over the first axis, (128, 16): stages 1, 2, 4, ... 64."""
    x = x.copy()
    half = 1
    while half < len(x):
        for i in range(len(x)):
            if not i & half:
                x[i], x[i + half] = x[i] + x[i + half], x[i] - x[i + half]
        half *= 2
    return x


def lane_sums(x, y):
    """Float64, number i in partial sum i mod 4, those by halves."""
    partial = np.zeros((4, LANES))
    for i in range(len(x)):
        partial[i % 4] += x[i].astype(f64) * y[i].astype(f64)
    return (partial[0] + partial[2]) + (partial[1] + partial[3])


def rotated_encode(x, bits, key, group):
    y = hadamard(x * f32(1 / BLOCK) * signs(key, group))
    squares = lane_sums(y, y)
    rms = np.sqrt(squares * (1 / BLOCK)).astype(f32)
    index = np.zeros(y.shape, np.int64)
    for threshold in THRESHOLDS[bits]:
        index += np.abs(y) > rms * f32(threshold)
    level = np.array(LEVELS[bits], f32)[index]
    negative = np.signbit(y)
    products = lane_sums(y, np.where(negative, -level, level))
    scales = np.minimum(squares / np.where(products > 0, products, 1), 2.0**115)
    scales = np.where(products > 0, scales, 0).astype(f32)
    codes = (index + (negative << (bits - 1))).reshape(GROUP)
    return scales.tobytes() + b"".join(pack(block, bits) for block in codes.reshape(-1, BLOCK))


def rotated_decode(data, bits, key, group):
    scales = np.frombuffer(data[:64], f32)
    codes = np.concatenate([unpack(data[64 + 16 * bits * k :][: 16 * bits], bits) for k in range(16)])
    codes = codes.reshape(BLOCK, LANES).astype(np.int64)
    sign = 2 ** (bits - 1)
    level = np.array(LEVELS[bits], f32)[codes % sign] * scales
    return (hadamard(np.where(codes >= sign, -level, level)) * signs(key, group)).reshape(GROUP)


def halves(name, x):
    with np.errstate(over="ignore"):
        if name == "float16":
            half = x.astype(np.float16)
            return np.clip(half, f64(-65504), f64(65504)).astype(np.float16)
    bits = x.view(u32)
    rounded = ((bits & u32(0x7FFFFFFF)) + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return (np.minimum(rounded, u32(0x7F7F)) | ((bits >> u32(16)) & u32(0x8000))).astype(np.uint16)


def padded(x, block, least=False):
    """Zeros follow, or the least element of a short last block."""
    short = len(x) % block
    return np.concatenate([x, np.full(-len(x) % block, x[-short:].min() if least and short else 0, f32)])


@np.errstate(over="ignore", under="ignore")
def encode(name, x, key=0, low=0.0, high=0.0):
    """The bytes of a row."""
    x = np.asarray(x, f32)
    if name in ("float16", "bfloat16"):
        return halves(name, x).tobytes()
    coding, bits = name.rsplit("-", 1)
    bits, grid = int(bits), (f32(0), f32(0))
    body = b""
    if coding == "affine-vector":
        grid = grid_over(low, high, bits)
    for group, part in enumerate(np.split(x, range(GROUP, len(x), GROUP)) if len(x) else []):
        if coding == "rotated":
            body += rotated_encode(padded(part, GROUP).reshape(BLOCK, LANES), bits, key, group)
            continue
        grids, codes = [], b""
        for k, block in enumerate(padded(part, BLOCK, least=coding == "affine").reshape(-1, BLOCK)):
            own = grid if coding == "affine-vector" else grid_over(block.min(), block.max(), bits)
            grids.append(own)
            codes += pack(affine_codes(block, *own, bits, key, 16 * group + k), bits)
        if coding == "affine":
            body += np.array(grids, GRID).tobytes().ljust(128, b"\0")
        body += codes
    head = struct.pack("<4sBBxxqQff", b"AFR1", CODINGS[coding], bits, len(x), key, *grid).ljust(HEAD, b"\0")
    return head + body + b"\0" * (-len(body) % 64)


@np.errstate(over="ignore", under="ignore")
def decode(name, row, size):
    """Float32, (size,)."""
    if name == "float16":
        return np.frombuffer(row, np.float16).astype(f32)
    if name == "bfloat16":
        return (np.frombuffer(row, np.uint16).astype(u32) << u32(16)).view(f32)
    magic, coding, bits, held, key, low, step = struct.unpack("<4sBBxxqQff", row[:32])
    assert (magic, held) == (b"AFR1", size)
    facts = {4: 128, 5: 0, 6: 64}[coding]
    out = []
    for group, at in zip(range(0, size, GROUP), range(HEAD, len(row), facts + GROUP // 8 * bits), strict=True):
        if coding == 6:
            out.append(rotated_decode(row[at : at + facts + GROUP // 8 * bits], bits, key, group // GROUP))
            continue
        grids = np.frombuffer(row[at : at + facts], GRID)
        for k in range(-(-min(GROUP, size - group) // BLOCK)):
            start, width = at + facts + 16 * bits * k, (f32(low), f32(step)) if coding == 5 else grids[k].item()
            codes = unpack(row[start : start + 16 * bits], bits)
            out.append(f32(width[0]) + f32(width[1]) * codes.astype(f32))
    return np.concatenate([*out, np.zeros(0, f32)])[:size]
