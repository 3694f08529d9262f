"""Awkward input to the operations: a clear message that names operation and argument, and nothing written."""

import numpy as np
import pytest
from msgspec.structs import replace

from afflux import UnavailableError, _engine, ops
from conftest import FakeCuda, bits, check_error, read_only

D = 8


def f32(size=D, value=1.0):
    return np.full(size, value, np.float32)


def unaligned(size=D):
    array = np.frombuffer(bytearray(4 * size + 1), np.uint8)[1:].view(np.float32)
    assert array.ctypes.data % 4 == 1
    return array


BAD_VECTORS = [
    (f32(D + 1), "has 9 elements, expected 8"),
    (f32(2 * D)[::2], "is strided"),
    (f32()[::-1], "is strided"),
    (unaligned(), "is not aligned to 4 bytes"),
    (f32().reshape(2, 4), "has 2 dimensions, expected 1"),
    (np.ones(D, np.complex64), "is complex64, expected"),
    (np.ones(D, np.int32), "expected"),
    (np.ones(D, ">f4"), "expected"),
    (np.ma.masked_array(f32(), np.arange(D) == 2), "is a masked array: give its filled() values"),
    ("1.0", "is a str, expected an array"),
    (None, "is a NoneType, expected an array"),
]
IDS = ["length", "strided", "reversed", "unaligned", "2d", "complex", "int32", "big-endian", "masked", "str", "none"]


@pytest.mark.parametrize(("bad", "message"), BAD_VECTORS, ids=IDS)
@pytest.mark.parametrize("place", ["params", "out", "updates", "rows", "new_rows"])
def test_apply_refuses(bad, message, place):
    good = {name: f32() for name in ("params", "out", "updates", "rows", "new_rows")} | {"sum": np.zeros(D)}
    arguments = good | {place: bad}
    if place in ("rows", "new_rows") and bad is None:
        return  # allowed: no row
    before = {name: bits(array) for name, array in good.items()}
    calibrate = ops.CachedDifference(arguments["sum"], 3, [arguments["rows"]], [arguments["new_rows"]])
    combine = ops.Combine([arguments["updates"]], np.array([0.5]))
    round = ops.Pass(arguments["params"], arguments["out"], combine, calibrate)
    text = str(check_error(r"^\[apply\] ", ops.apply, round))
    if place == "params" and "elements" in message:
        assert "out has 8 elements, expected 9" in text
    elif place in ("rows", "new_rows") and "elements" in message:
        assert f"{place}[0] has 36 elements, expected 32" in text
    else:
        name = place + "[0]" if place in ("updates", "rows", "new_rows") else place
        assert f"{name} " in text
        assert message in text
    assert {name: bits(array) for name, array in good.items()} == before


ADAM = ops.Step("adam", 1.0, 0.9, 0.99, 1e-3)


def unaligned64(size):
    return np.frombuffer(bytearray(8 * size + 1), np.uint8)[1:].view(np.float64)


def mix(weights, count=1, *more):
    return {"combine": ops.Combine([f32()] * count, np.array(weights), *more)}


def cached(sum=None, rows=(None,), new_rows=(None,), clients=3):
    return {"calibrate": ops.CachedDifference(np.zeros(D) if sum is None else sum, clients, [*rows], [*new_rows])}


def step(*numbers, **changes):
    made = replace(ops.Step(*numbers) if numbers else ADAM, **changes)
    return {"step": made, "states": [f32()] * (1 if made.kind == "momentum" else 2)}


def remember(*vectors, **changes):
    own = ops.RuleVectors([f32(), *vectors] if vectors else [f32(), f32()], np.ones(2), np.ones((2, 3)))
    return {"rule_vectors": replace(own, **changes)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (cached(np.zeros(D + 1)), "sum has 9 elements, expected 8"),
        (cached(np.zeros(2 * D)[::2]), "sum is strided"),
        (cached(unaligned64(D)), "sum is not aligned to 8 bytes"),
        (cached(f32()), "sum is float32, expected float64"),
        (cached(read_only(np.zeros(D))), "sum is read-only, but is written"),
        (cached("none"), "sum is a str, expected an array"),
        (cached(clients=0), "num_clients is 0"),
        (cached(rows=()), "rows has 0 and new_rows 1 entries, updates has 1"),
        (cached(new_rows=(None, None)), "rows has 1 and new_rows 2 entries, updates has 1"),
        (cached(rows=[np.empty(0, np.float32)]), r"rows\[0\] has 0 elements, expected 32"),  # no missing row
        (mix([0.5], 2), "weights has 1 entries, updates has 2"),
        (mix([0.5, np.nan], 2), r"weights\[1\] is not finite"),
        (mix([np.inf, 0.5], 2), r"weights\[0\] is not finite"),
        ({"combine": ops.Combine([f32()], unaligned64(1))}, "weights is not aligned to 8 bytes"),
        (mix([0.5], 1, np.nan), "params_weight is not finite"),
        ({"step": ops.Step("sgd", np.inf)}, "lr is not finite"),
        (step("momentum", np.nan, 0.9), "lr is not finite"),
        (step("momentum", 1.0, 1.0), "beta1 is 1.0+, must be at least 0 and less than 1"),
        (step("momentum", 1.0, np.nan), "beta1 is nan, must be"),
        (step(beta2=-0.1), "beta2 is -0.10*, must be at least 0 and less than 1"),
        (step(epsilon=-1e-9), "epsilon is -0.0*, must be at least 0"),
        (step(epsilon=np.inf), "epsilon is not finite"),
        (step(root_scale=np.nan), "root_scale is not finite"),
        (step(root_scale=0.0), "root_scale is 0.0*, must be greater than 0"),
        (step(root_scale=-1.0), "root_scale is -1.0*, must be greater than 0"),
        (step(kind="amsgrad"), "states has 2 vectors, amsgrad keeps 3"),
        (step(kind="adamw"), "step 'adamw' is unknown"),
        (step("sgd"), "states has 2 vectors, sgd keeps 0"),
        (remember(*[f32()] * 4, weights=np.ones(5), next=None), "rule_vectors.vectors has 5 vectors, at most 4 are"),
        (remember(np.ones(D)), r"rule_vectors.vectors\[1\] is float64, expected float32"),
        (remember(f32(D + 1)), r"rule_vectors.vectors\[1\] has 9 elements, expected 8"),
        (remember(read_only(f32())), r"rule_vectors.vectors\[1\] is read-only"),
        (remember(weights=np.ones(3)), "rule_vectors.weights has 3 elements, expected 2"),
        (remember(weights=np.array([1.0, np.inf])), r"rule_vectors.weights\[1\] is not finite"),
        (remember(weights=np.ones(2, np.float32)), "rule_vectors.weights is float32, expected float64"),
        (remember(next=np.ones((2, 2))), r"rule_vectors.next has shape \(2, 2\), expected \(2, 3\)"),
        (remember(next=np.ones(6)), r"rule_vectors.next has shape \(6,\), expected \(2, 3\)"),
        (remember(next=np.full((2, 3), np.nan)), r"rule_vectors.next\[0\] is not finite"),
        (remember(next=np.ones((3, 2)).T), "rule_vectors.next is not C-contiguous"),
    ],
)
def test_apply_refuses_values(changes, message):
    round = replace(ops.Pass(f32(), f32(value=7.0), ops.Combine([f32()], np.ones(1))), **changes)
    check_error(rf"^\[apply\] {message}", ops.apply, round)
    assert bits(round.out) == bits(f32(value=7.0))
    assert all(bits(state) == bits(f32()) for state in round.states)


@pytest.mark.parametrize("held", ["states", "memory"])
@pytest.mark.parametrize("other", ["params", "out", "update", "sum", "row", "new_row", "next", "itself"])
def test_apply_refuses_what_overlaps_states_and_memories(held, other):
    shared = np.ones(2 * D)
    given = {name: f32() for name in ("params", "out", "update", "row", "new_row")}
    given |= {"sum": np.ones(D), "next": np.ones((2, 3))}
    vector = shared.view(np.float32)[2 : 2 + D]
    if other in ("sum", "next"):
        given[other] = shared[:D] if other == "sum" else shared[:6].reshape(2, 3)
    elif other != "itself":
        given[other] = shared.view(np.float32)[4 : 4 + D]
    pair = [vector, vector if other == "itself" else f32()]
    states, vectors = (pair, [f32(), f32()]) if held == "states" else ([f32(), f32()], pair)
    calibrate = ops.CachedMean(given["sum"], 3, [given["row"]], [given["new_row"]])
    rule_vectors = ops.RuleVectors(vectors, np.ones(2), given["next"])
    round = ops.Pass(given["params"], given["out"], ops.Combine([given["update"]], np.ones(1)), calibrate, ADAM, states)
    text = r"^\[apply\] .* overlap in memory, and one of them is written"
    error = check_error(text, ops.apply, replace(round, rule_vectors=rule_vectors))
    assert ("states[" if held == "states" else "rule_vectors.vectors[") in str(error)
    assert bits(shared) == bits(np.ones(2 * D))


def brain(size=D):
    return _engine.Buffer(_engine.Pool(size, "bfloat16", 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": np.ones(D)}, "out is float32, expected float64"),
        ({"out": np.ones(D)}, "out is float64, expected float32"),
        ({"params": np.ones(D, np.float16)}, "params is float16, expected float32 or float64"),
        ({"out": brain()}, "out is bfloat16, expected float32"),
        ({"updates": [f32(), f32(), np.ones(D)]}, r"updates\[2\] is float64, updates\[0\] is float32"),
        ({"updates": [brain(), f32(), brain()]}, r"updates\[1\] is float32, updates\[0\] is bfloat16"),
        ({"updates": [np.ones(D, np.float16)] * 3}, r"updates\[0\] is float16, expected float32, float64 or bfloat16"),
        ({"rows": [None, np.ones(D), None]}, r"rows\[1\] is float64, expected uint8 or float32"),
        ({"updates": [np.ones(D)] * 3, "rows": [f32(), None, None]}, r"rows\[0\] is float32, expected uint8 or"),
        ({"updates": [np.ones(D)] * 3, "new_rows": [np.empty(32, np.uint8), None, None]}, "32 elements, expected 64"),
    ],
)  # fmt: skip
def test_apply_refuses_mixed_types(change, message):
    given = {"params": f32(), "out": f32(), "updates": [f32()] * 3, "rows": [None] * 3, "new_rows": [None] * 3} | change
    combine = ops.Combine(given["updates"], np.ones(3))
    stage = ops.CachedDifference(np.zeros(D), 3, given["rows"], given["new_rows"])
    before = bits(given["out"]) if isinstance(given["out"], np.ndarray) else None
    done: list[None] = []
    check_error(message, ops.apply, ops.Pass(given["params"], given["out"], combine, stage), done=done)
    assert done == []
    assert before is None or bits(given["out"]) == before


def test_apply_tells_when_the_sweep_is_done():
    done: list[bool] = []
    ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32()], np.ones(1))), done=done)
    assert done == [True]


def test_many_updates_are_checked_in_linear_time():
    same = f32()
    out = f32()
    ops.apply(ops.Pass(f32(), out, ops.Combine([same] * 100_000, np.full(100_000, 2.0**-20))))
    assert out.tolist() == [1 + 100_000 * 2.0**-20] * D


def test_no_arrivals():
    params, out = f32(value=3.0), f32()
    ops.apply(ops.Pass(params, out, ops.Combine([], np.array([]))))
    assert bits(out) == bits(params)
    assert ops.gram([]).shape == (0, 0)


@pytest.mark.parametrize(("bad", "message"), BAD_VECTORS[1:], ids=IDS[1:])
def test_ingest_refuses(bad, message):
    slot = f32(value=7.0)
    for update, name in ((bad, r"update"), ([f32(0), bad], r"update\[1\]")):
        if name != "update" and "dimensions" in message:
            continue  # parts may have any shape
        assert message in str(check_error(rf"^\[ingest\] {name} ", ops.ingest, update, slot))
    assert bits(slot) == bits(f32(value=7.0))
    check_error(r"^\[ingest\] slot ", ops.ingest, f32(), bad)


class Nonsense(FakeCuda):
    def __dlpack_device__(self):
        return None


NO_CUDA = "but this (build has no CUDA kernels|machine has no GPU that CUDA can use: .+|machine has 1 GPU)"


def test_other_calls_refuse():
    slot, row, float16 = f32(value=7.0), np.full(64, 7, np.uint8), np.ones(D, np.float16)
    check_error(r"\[ingest\] slot has 8 elements, expected 9", ops.ingest, f32(D + 1), slot)
    check_error(r"\[ingest\] slot has 8 elements, expected 7", ops.ingest, [f32(3), f32(4)], slot)
    check_error(r"\[ingest\] slot has 8 elements, expected 0", ops.ingest, [], slot)
    check_error(r"\[ingest\] update\[0\] is a float, expected an array", ops.ingest, [1.0] * D, slot)
    check_error(r"\[ingest\] update\[1\] is a list, expected an array", ops.ingest, [f32(4), [f32(4)]], slot)
    check_error(r"update\[1\] is not C-contiguous", ops.ingest, [f32(4), np.ones((2, 4), np.float32)[:, ::2]], slot)
    check_error(r"update\[1\] is int64, expected float32, float64, float16 or", ops.ingest, [f32(7), np.array(1)], slot)
    check_error("slot is float16, expected float32, float64 or bfloat16", ops.ingest, f32(), float16)
    check_error("update has a __dlpack_device__ that does not return two integers", ops.ingest, Nonsense(), slot)
    check_error(f"update is on cuda:1, {NO_CUDA}$", ops.ingest, FakeCuda(), slot, error=UnavailableError)
    for number in (0, -1):
        check_error(f"num_threads is {number}, must be an int of at least", ops.ingest, f32(), slot, num_threads=number)
        check_error(f"num_threads is {number}, must be an int of at least 1", ops.gram, [f32()], num_threads=number)
    check_error("num_threads is True, must be an int", ops.ingest, f32(), slot, num_threads=True)
    check_error(r"\[gram\] vectors\[1\] has 9 elements, expected 8", ops.gram, [f32(), f32(D + 1)])
    check_error(r"\[gram\] vectors\[0\] is a masked array", ops.gram, [np.ma.masked_array(f32(), np.arange(D) == 2)])
    check_error(r"\[gram\] vectors\[0\] is float16, expected float32, float64 or bfloat16", ops.gram, [float16])
    check_error(r"\[encode\] row has 31 elements, expected 32", ops.encode, f32(), row[:31])
    check_error(r"\[codec\] 'int3' is unknown; known: float32, float64, ", ops.encode, f32(), row[:32], codec="int3")
    check_error(r"\[encode\] vector is float32, expected float64", ops.encode, f32(), row, codec="float64")
    check_error(r"\[decode\] row is float64", ops.decode, np.empty(4), slot)
    odd = np.empty(65, np.uint8)[1:]
    check_error(r"\[decode\] row is not aligned to 8 bytes", ops.decode, odd, np.empty(D), codec="float64")
    check_error("'sse9', which is unknown here; known: ", ops.choose_isa, "sse9", error=UnavailableError)
    assert bits(slot) == bits(f32(value=7.0))
    assert row.tolist() == [7] * 64


def test_numbers_of_numpy_and_whole_floats_are_thread_counts():
    for number in (np.int32(2), 2.0, np.float32(2)):
        assert ops.gram([f32()], num_threads=number).tolist() == [[D]]
    row = np.empty(4 * D, np.uint8)
    ops.encode(f32(), row, num_threads=np.int64(1))
    check_error(r"num_threads is 1\.5, must be an int", ops.decode, row, f32(), num_threads=1.5)
