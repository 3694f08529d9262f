"""A digest of everything that must be the same bit for bit, whatever computes it; prints one SHA-256 per part.

python -m afflux.selftest.digest [num_threads ...]
python -m afflux.selftest.digest --golden > golden.json     (only with a new order_version, or a new rule)
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from afflux import Server, _engine, exp, log, ops, pow
from afflux.arrays.interop import on_host
from afflux.ops import codecs
from afflux.rules import RULES, staleness

#: Around every border of the order: lanes, blocks, superblocks, and none of them.
SIZES = [0, 1, 15, 17, 31, 32, 33, 1023, 1025, 2047, 2049, 65535, 65536, 65537, 3 * 65536 + 5]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
#: Three vectors of each type that updates may have, by the name of the type.
Typed = Mapping[str, Sequence[Any]]


def golden() -> dict[str, str]:
    """Return the digests of all versions of afflux with this order of sums, by part."""
    digests = json.loads((Path(__file__).parent / "golden.json").read_text())
    order_version = digests.pop("order_version")
    if order_version != _engine.ORDER_VERSION:
        raise RuntimeError(f"golden.json is of order_version {order_version}, the engine of {_engine.ORDER_VERSION}")
    return dict(digests)


def hashed(seed: int, count: int) -> NDArray[np.uint64]:
    """64 random bits each, by splitmix64: NumPy's own streams may change between its versions."""
    z = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def vectors(seed: int, count: int, size: int) -> Floats:
    """Integers scaled by powers of two: the same bits from any NumPy, and sums that do round."""
    noise = hashed(seed, count * size)
    mantissa = (noise >> np.uint64(39)).astype(np.int64) - 2**24
    scaled = np.ldexp(mantissa.astype(np.float64), -10 - (noise % np.uint64(40)).astype(np.int64))
    scaled = scaled.reshape(count, size)
    scaled[:, ::97] = 1e-41  # subnormal in float32
    return scaled.astype(np.float32)


def inputs() -> tuple[list[Floats], list[Doubles]]:
    """Nine vectors over three superblocks and a tail, and two of them as float64."""
    data = list(vectors(1, 9, 3 * 65536 + 4099))
    return data, [update.astype(np.float64) * 1.1 for update in data[:2]]


def operations(num_threads: int, data: Sequence[Floats], wide: Sequence[Doubles]) -> str:
    """ingest, gram, apply and the cached difference."""
    digest = hashlib.sha256()
    size = data[0].size
    weights = np.array([0.1, -0.7, 1 / 3, 0.0, 0.9, 1e-3, 2.5])
    out, cache = np.empty(size, np.float32), np.linspace(-1, 1, size)
    for update in wide:
        facts = ops.ingest(update, out, num_threads=num_threads)
        digest.update(np.array([facts.sum_of_squares, facts.min, facts.max]).tobytes() + out.tobytes())
    digest.update(ops.gram(data, num_threads=num_threads).tobytes())
    ops.apply(
        ops.Pass(data[8], out, ops.Combine(data[:7], weights, -0.3), step=ops.Step("sgd", 0.3)),
        num_threads=num_threads,
    )
    digest.update(out.tobytes())
    rows = [row.copy() for row in data[1:8]]
    stage = ops.CachedDifference(cache, 11, [None, *rows[1:]], rows)
    ops.apply(
        ops.Pass(data[8], out, ops.Combine(data[:7], weights), stage, ops.Step("sgd", 0.7)),
        num_threads=num_threads,
    )
    arrays: list[NDArray[Any]] = [out, cache, *rows]
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def pooled(dtype: str, size: int) -> Any:
    """An empty buffer of the engine, which also supports bfloat16."""
    return _engine.Buffer(_engine.Pool(size, dtype, 1))


def typed_inputs() -> tuple[list[Any], Typed]:
    """An update in parts of every type, and three vectors of each type that updates may have."""
    data, wide = inputs()
    size = data[0].size
    noise = (hashed(4, size) >> np.uint64(48)).astype(np.uint16)
    half = (noise & np.uint16(0xBBFF)).view(np.float16)  # no infinity, no NaN
    brain = [pooled("bfloat16", size) for _ in range(3)]
    for buffer, update in zip(brain, data, strict=False):
        ops.ingest(update, buffer)
    parts = [data[0][:70_001], wide[0][70_001:70_002], half[: size - 75_001].reshape(1, -1), wide[1][:4999]]
    return parts, {"float32": data[:3], "float64": [*wide, data[2].astype(np.float64)], "bfloat16": brain}


def short_inputs(size: int) -> tuple[list[Floats], list[Doubles], list[Any], Typed]:
    """Nine vectors of that size, two as float64, one in parts of three types, and three of each type of update."""
    data = list(vectors(6, 9, size))
    wide = [update.astype(np.float64) * 1.1 for update in data[:2]]
    brain = [pooled("bfloat16", size) for _ in range(3)]
    for buffer, update in zip(brain, data, strict=False):
        ops.ingest(update, buffer)
    half = (hashed(7, size) >> np.uint64(48)).astype(np.uint16) & np.uint16(0xBBFF)
    ends = size // 3, size // 2
    parts = [data[0][: ends[0]], wide[0][ends[0] : ends[1]], half.view(np.float16)[ends[1] :]]
    typed = {"float32": data[:3], "float64": [*wide, data[2].astype(np.float64)], "bfloat16": brain}
    return data, wide, parts, typed


def types(num_threads: int, parts: Sequence[Any], vectors: Typed) -> str:
    """ingest, gram, apply and the cached difference in every type that they take."""
    digest = hashlib.sha256()
    size = sum(part.size for part in parts)
    weights = np.array([0.1, -0.7, 1 / 3])
    for dtype in vectors:
        slot = pooled(dtype, size)
        facts = ops.ingest(parts, slot, num_threads=num_threads)
        digest.update(np.array([facts.sum_of_squares, facts.min, facts.max]).tobytes() + np.asarray(slot).tobytes())
        digest.update(ops.gram(vectors[dtype], num_threads=num_threads).tobytes())
        combine = ops.Combine(vectors[dtype], weights, 0.25)
        for params in (vectors["float32"][1], vectors["float64"][1]):
            out, cache = np.empty_like(params), np.linspace(-1, 1, size)
            ops.apply(ops.Pass(params, out, combine, step=ops.Step("sgd", 0.3)), num_threads=num_threads)
            digest.update(out.tobytes())
            rows = np.zeros((3, size), np.float64 if dtype == "float64" else np.float32)
            stage = ops.CachedDifference(cache, 11, [None, *rows[1:]], list(rows))
            for _ in range(2):
                ops.apply(ops.Pass(params, out, combine, stage, ops.Step("sgd", 0.7)), num_threads=num_threads)
            digest.update(out.tobytes() + cache.tobytes() + rows.tobytes())
    return digest.hexdigest()


def inner_products(num_threads: int, vectors: Typed) -> str:
    """Inner with and without a memory and weights, of vectors of each type and of mixed ones."""
    digest = hashlib.sha256()
    mixed = [vectors[dtype][k] for k in (0, 1) for dtype in vectors]
    for operands in (*vectors.values(), mixed):
        weights = np.array([0.1, -0.7, 0.0, 1 / 3, 2.5, -1e-3])[: len(operands)]
        for factors, shift, weight in [(weights, 0.3, 0.0), (weights, 0.0, -1.5), (None, 0.7, 0.0), (None, 0.0, 0.0)]:
            memory = vectors["float32"][2]
            products = ops.inner(
                operands, factors, memory=memory, shift=shift, memory_weight=weight, num_threads=num_threads
            )
            for value in products:
                digest.update(b"" if value is None else np.asarray(value).tobytes())
    return digest.hexdigest()


#: Of every kind but `assign`, which adds up the sums of a server.
STEPS: dict[str, ops.Step] = {
    **{kind: ops.Step(kind, 0.01, 0.9, 0.99, 1e-3, 1.25) for kind in _engine.STEP_KINDS if kind != "assign"},
    "sgd": ops.Step("sgd", 0.3),
    "momentum": ops.Step("momentum", -0.3, 0.9),
}


def stages(num_threads: int, vectors: Typed) -> str:
    """Every step on every calibration, with rule vectors that are replaced, in every type; gram of mixed types."""
    digest = hashlib.sha256()
    size = vectors["float32"][0].size
    weights, mixed = np.array([0.1, -0.7, 1 / 3]), [vectors[dtype][k] for k in (0, 1) for dtype in vectors]
    digest.update(ops.gram(mixed, num_threads=num_threads).tobytes())
    caches = [None, ops.CachedDifference, ops.CachedMean]
    rounds = [(kind, caches[(k + j) % 3], dtype) for k, kind in enumerate(STEPS) for j, dtype in enumerate(vectors)]
    for number, (kind, cache, dtype) in enumerate(rounds):
        wide = vectors["float64" if number % 2 else "float32"]
        states = [np.abs(wide[k]) for k in range(_engine.STEP_KINDS[kind])]
        held, out, total = [wide[0].copy(), wide[2].copy()], np.empty_like(wide[1]), np.linspace(-1, 1, size)
        rows = np.zeros((3, size), np.float64 if dtype == "float64" else np.float32)
        stage = cache and cache(total, 11, [None, *rows[1:]], [*rows[:2], None])
        following = np.array([[0.5, 0.1, 0.0, 1 / 3, -0.2], [0.0, 1.0, 0.0, 0.0, 0.7]])
        rule_vectors = ops.RuleVectors(held, np.array([0.2, -0.1]), following)
        ops.apply(
            ops.Pass(
                wide[1], out, ops.Combine(vectors[dtype], weights, 0.25), stage, STEPS[kind], states, rule_vectors
            ),
            num_threads=num_threads,
        )
        for array in (out, *states, *held, total, rows):
            digest.update(array.tobytes())
    return digest.hexdigest()


def encoded(num_threads: int, vectors: Typed) -> str:
    """Every codec's bytes, what they are decoded to, and a round over them for each type of update."""
    digest = hashlib.sha256()
    weights = np.array([0.1, -0.7, 1 / 3])
    for name, codec in ((name, codecs.Codec(name)) for name in get_args(codecs.Name)):
        if codec.exact:
            continue
        x = vectors["float32"]
        facts = [ops.RowFacts(k, float(v.min()), float(v.max())) for k, v in enumerate(x)]
        rows, out = [np.zeros(codec.row_bytes(v.size), np.uint8) for v in x], np.empty_like(x[0])
        for vector, row, fact in zip(x, rows, facts, strict=True):
            ops.encode(vector, row, codec=codec, facts=fact, num_threads=num_threads)
            ops.decode(row, out, codec=codec, num_threads=num_threads)
            digest.update(row.tobytes() + out.tobytes())
        dtype, total = list(vectors)[len(name) % 3], np.linspace(-1, 1, out.size)
        again = [fact._replace(key=fact.key + 9) for fact in facts]
        stage = ops.CachedDifference(total, 11, [None, *rows[1:]], rows, codec, again, len(name) % 2 == 1)
        mix = ops.Combine(vectors[dtype], weights)
        ops.apply(ops.Pass(x[1], out, mix, stage, ops.Step("sgd", 0.7)), num_threads=num_threads)
        for array in (out, total, *rows):
            digest.update(array.tobytes())
    return digest.hexdigest()


def tails(num_threads: int) -> str:
    """All operations around every border of the order, where a vector instruction, a block or a superblock ends."""
    digest = hashlib.sha256()
    for size in SIZES:
        data, wide, parts, typed = short_inputs(size)
        digest.update(operations(num_threads, data, wide).encode())
        digest.update(types(num_threads, parts, typed).encode())
        digest.update(stages(num_threads, typed).encode())
        if size:
            digest.update(encoded(num_threads, typed).encode())
    return digest.hexdigest()


def elementary() -> str:
    """10^5 results of exp, log and pow."""
    noise = hashed(5, 40_000)
    size = np.ldexp(
        1 + (noise >> np.uint64(12)).astype(np.float64) * 2.0**-52, (noise % np.uint64(2046)).astype(int) - 1022
    )
    small = (noise.astype(np.int64) >> 10).astype(np.float64) * 2.0**-44  # -512 .. 512
    results = [exp(1.4 * x) for x in small.tolist()[:30_000]] + [log(x) for x in size.tolist()[:30_000]]
    results += [pow(x, y / 256) for x, y in zip(size.tolist(), small.tolist(), strict=True)]
    return hashlib.sha256(np.array(results).tobytes()).hexdigest()


def rule(name: str, num_threads: int, put: Callable[[Floats], Any] = np.asarray) -> str:
    """Twelve rounds of a preset over a trace with staleness, repeated clients and unequal example counts.

    `put` copies params to the device of the server.
    """
    size = 70_001
    pool = vectors(2, 16, size)
    server = Server(RULES[name](), put(pool[15]), num_clients=40, num_threads=num_threads)
    for memory in server.rule.needs.handed_in:
        server.set_rule_vector(memory, pool[14])
    for noise in hashed(3, 1000).tolist():
        if server.version >= 12:  # a pass may begin with a step
            break
        lag, client, pick, examples = noise % 9, (noise >> 8) % 40, (noise >> 16) % 15, (noise >> 24) % 60
        server.push(
            client=client,
            **{server.rule.kind: pool[pick]},
            version=max(0, server.version - lag),
            num_examples=examples + 1,
        )
    assert server.version >= 12
    digest = hashlib.sha256(on_host(server.params).tobytes())
    for vector in server.rule_vectors.values():
        digest.update(on_host(vector).tobytes())
    return digest.hexdigest()


def model_statistics(num_threads: int) -> str:
    """Buffers of a model after rounds of rules of each kind, with unequal and with equal weights."""
    digest = hashlib.sha256()
    values = np.abs(vectors(8, 12, 65536 + 33)).astype(np.float64)
    for name in ("fedavg", "fedbuff", "fedasync"):
        tree = [{"w": v[:9].astype(np.float32), "running_var": v} for v in values]
        server = Server(RULES[name](), tree[11], num_threads=num_threads)
        for client in range(2 * server.rule.buffer_size):
            pushed = tree[client % 11]
            server.push(client=client, version=server.version, model=pushed, num_examples=1 + client % 3)
        digest.update(np.asarray(server.pull().buffers).tobytes())
    return digest.hexdigest()


def weights() -> str:
    """The weighing laws over many stalenesses."""
    laws = [staleness.Polynomial(a / 2) for a in range(6)] + [staleness.Hinge(), staleness.Hinge(0.3, 2.5)]
    values = np.array([[law(t) for t in range(2000)] for law in laws])
    return hashlib.sha256(values.tobytes()).hexdigest()


def operation_parts(num_threads: int) -> dict[str, str]:
    """Name and digest of each part that is made by the engine's operations alone."""
    return {
        "operations": operations(num_threads, *inputs()),
        "types": types(num_threads, *typed_inputs()),
        "stages": stages(num_threads, typed_inputs()[1]),
        "inner": inner_products(num_threads, typed_inputs()[1]),
        "codecs": encoded(num_threads, typed_inputs()[1]),
        "tails": tails(num_threads),
        "weights": weights(),
        "elementary": elementary(),
    }


def parts(num_threads: int) -> dict[str, str]:
    """Name and digest of each part."""
    rules = {name: rule(name, num_threads) for name in RULES}
    return operation_parts(num_threads) | {"statistics": model_statistics(num_threads)} | rules


if __name__ == "__main__":
    if sys.argv[1:] == ["--golden"]:
        print(json.dumps({"order_version": _engine.ORDER_VERSION} | parts(1), indent=2))
        sys.exit()
    for threads in [int(a) for a in sys.argv[1:]] or [1]:
        for part, value in parts(threads).items():
            print(threads, part, value)
