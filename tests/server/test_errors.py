"""Awkward input to the operations: a clear message that names operation and argument, and nothing written."""

import numpy as np
import pytest
from msgspec.structs import replace

from afflux import AffluxError, UnavailableError, _engine, ops
from conftest import FakeCuda, bits

D = 8


def f32(size=D, value=1.0):
    return np.full(size, value, np.float32)


def unaligned(size=D):
    array = np.frombuffer(bytearray(4 * size + 1), np.uint8)[1:].view(np.float32)
    assert array.ctypes.data % 4 == 1
    return array


def read_only(array):
    array.flags.writeable = False
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
IDS = [
    "length",
    "strided",
    "reversed",
    "unaligned",
    "2d",
    "complex",
    "int32",
    "big-endian",
    "masked",
    "str",
    "none",
]


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
    with pytest.raises(AffluxError) as caught:
        ops.apply(ops.Pass(arguments["params"], arguments["out"], combine, calibrate))
    text = str(caught.value)
    assert text.startswith("[apply] ")
    if place == "params" and "elements" in message:
        assert "out has 8 elements, expected 9" in text
    elif place in ("rows", "new_rows") and "elements" in message:
        assert f"{place}[0] has 36 elements, expected 32" in text
    else:
        name = place + "[0]" if place in ("updates", "rows", "new_rows") else place
        assert f"{name} " in text
        assert message in text
    assert {name: bits(array) for name, array in good.items()} == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(D + 1), "has 9 elements, expected 8"),
        (np.zeros(2 * D)[::2], "is strided"),
        (
            np.frombuffer(bytearray(8 * D + 1), np.uint8)[1:].view(np.float64),
            "is not aligned to 8 bytes",
        ),
        (f32(), "is float32, expected float64"),
        (read_only(np.zeros(D)), "is read-only, but is written"),
        (None, "is a NoneType, expected an array"),
    ],
)
def test_apply_refuses_the_sum(bad, message):
    out = f32(value=7.0)
    stage = ops.CachedDifference(bad, 3, [None], [None])
    with pytest.raises(AffluxError, match=rf"\[apply\] sum {message}"):
        ops.apply(ops.Pass(f32(), out, ops.Combine([f32()], np.array([0.5])), stage))
    assert bits(out) == bits(f32(value=7.0))


@pytest.mark.parametrize(
    ("weights", "updates", "params_weight", "lr", "message"),
    [
        ([0.5], 2, 0.0, 1.0, "weights has 1 entries, updates has 2"),
        ([0.5, np.nan], 2, 0.0, 1.0, r"weights\[1\] is not finite"),
        ([np.inf, 0.5], 2, 0.0, 1.0, r"weights\[0\] is not finite"),
        ([0.5], 1, np.nan, 1.0, "params_weight is not finite"),
        ([0.5], 1, 0.0, np.inf, "lr is not finite"),
    ],
)
def test_apply_refuses_scalars(weights, updates, params_weight, lr, message):
    out = f32(value=7.0)
    combine = ops.Combine([f32()] * updates, np.array(weights), params_weight)
    with pytest.raises(AffluxError, match=message):
        ops.apply(ops.Pass(f32(), out, combine, step=ops.Step("sgd", lr)))
    assert bits(out) == bits(f32(value=7.0))


@pytest.mark.parametrize(
    ("clients", "rows", "new_rows", "message"),
    [
        (0, [None], [None], "num_clients is 0"),
        (3, [], [None], "rows has 0 and new_rows 1 entries, updates has 1"),
        (3, [None], [None, None], "rows has 1 and new_rows 2 entries, updates has 1"),
    ],
)
def test_apply_refuses_calibration(clients, rows, new_rows, message):
    stage = ops.CachedDifference(np.zeros(D), clients, rows, new_rows)
    with pytest.raises(AffluxError, match=message):
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32()], np.array([1.0])), stage))


ADAM = ops.Step("adam", 1.0, 0.9, 0.99, 1e-3)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (ops.Step("momentum", np.nan, 0.9), "lr is not finite"),
        (ops.Step("momentum", 1.0, 1.0), "beta1 is 1.0+, must be at least 0 and less than 1"),
        (ops.Step("momentum", 1.0, np.nan), "beta1 is nan, must be"),
        (replace(ADAM, beta2=-0.1), "beta2 is -0.10*, must be at least 0 and less than 1"),
        (replace(ADAM, epsilon=-1e-9), "epsilon is -0.0*, must be at least 0"),
        (replace(ADAM, epsilon=np.inf), "epsilon is not finite"),
        (replace(ADAM, root_scale=np.nan), "root_scale is not finite"),
        (replace(ADAM, root_scale=0.0), "root_scale is 0.0*, must be greater than 0"),
        (replace(ADAM, root_scale=-1.0), "root_scale is -1.0*, must be greater than 0"),
        (replace(ADAM, kind="amsgrad"), "states has 2 vectors, amsgrad keeps 3"),
        (replace(ADAM, kind="adamw"), "step 'adamw' is unknown"),
        (ops.Step("sgd"), "states has 2 vectors, sgd keeps 0"),
    ],
)
def test_apply_refuses_steps(step, message):
    states = [f32(), f32()][: 1 if step.kind == "momentum" else 2]
    out = f32(value=7.0)
    with pytest.raises(AffluxError, match=rf"^\[apply\] {message}"):
        ops.apply(ops.Pass(f32(), out, ops.Combine([f32()], np.ones(1)), step=step, states=states))
    assert bits(out) == bits(f32(value=7.0))
    assert all(bits(state) == bits(f32()) for state in states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": [f32()] * 5}, "rule_vectors.vectors has 5 vectors, at most 4 are served"),
        ({"vectors": [f32(), np.ones(D)]}, r"rule_vectors.vectors\[1\] is float64, expected float32"),
        ({"vectors": [f32(), f32(D + 1)]}, r"rule_vectors.vectors\[1\] has 9 elements, expected 8"),
        ({"vectors": [f32(), read_only(f32())]}, r"rule_vectors.vectors\[1\] is read-only"),
        ({"weights": np.ones(3)}, "rule_vectors.weights has 3 elements, expected 2"),
        ({"weights": np.array([1.0, np.inf])}, r"rule_vectors.weights\[1\] is not finite"),
        ({"weights": np.ones(2, np.float32)}, "rule_vectors.weights is float32, expected float64"),
        ({"next": np.ones((2, 2))}, r"rule_vectors.next has shape \(2, 2\), expected \(2, 3\)"),
        ({"next": np.ones(6)}, r"rule_vectors.next has shape \(6,\), expected \(2, 3\)"),
        ({"next": np.full((2, 3), np.nan)}, r"rule_vectors.next\[0\] is not finite"),
        ({"next": np.ones((3, 2)).T}, "rule_vectors.next is not C-contiguous"),
    ],
)
def test_apply_refuses_memories(change, message):
    rule_vectors = replace(ops.RuleVectors([f32(), f32()], np.ones(2), np.ones((2, 3))), **change)
    if "vectors" in change and len(change["vectors"]) == 5:
        rule_vectors = ops.RuleVectors(change["vectors"], np.ones(5))
    out = f32(value=7.0)
    with pytest.raises(AffluxError, match=rf"^\[apply\] {message}"):
        ops.apply(ops.Pass(f32(), out, ops.Combine([f32()], np.ones(1)), rule_vectors=rule_vectors))
    assert bits(out) == bits(f32(value=7.0))


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
    with pytest.raises(AffluxError, match=r"^\[apply\] .* overlap in memory, and one of them is written") as caught:
        ops.apply(replace(round, rule_vectors=rule_vectors))
    assert ("states[" if held == "states" else "rule_vectors.vectors[") in str(caught.value)
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
    with pytest.raises(AffluxError, match=message):
        ops.apply(ops.Pass(given["params"], given["out"], combine, stage), done=done)
    assert done == []
    assert before is None or bits(given["out"]) == before


def test_apply_tells_when_the_sweep_is_done():
    done: list[bool] = []
    ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32()], np.ones(1))), done=done)
    assert done == [True]


def test_apply_refuses_overlaps():
    memory = f32(4 * D)
    a, shifted = memory[:D], memory[4 : 4 + D]
    one = np.array([0.5])
    with pytest.raises(AffluxError, match=r"(params and out|out and params) overlap"):
        ops.apply(ops.Pass(a, shifted, ops.Combine([f32()], one)))
    with pytest.raises(AffluxError, match=r"out.*overlap"):
        ops.apply(ops.Pass(f32(), a, ops.Combine([a], one)))
    with pytest.raises(AffluxError, match=r"updates\[0\] and new_rows\[0\] overlap"):
        stage = ops.CachedDifference(np.zeros(D), 2, [None], [a])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([a], one), stage))
    with pytest.raises(AffluxError, match=r"new_rows\[0\] and new_rows\[1\] overlap"):
        stage = ops.CachedDifference(np.zeros(D), 2, [None, None], [a, a])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32(), f32()], np.array([1.0, 1.0])), stage))
    with pytest.raises(
        AffluxError, match=r"rows\[1\] and new_rows\[0\] overlap"
    ):  # a later arrival would read the new row
        stage = ops.CachedDifference(np.zeros(D), 2, [a, a], [a, None])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32(), f32()], np.array([1.0, 1.0])), stage))
    assert bits(memory) == bits(f32(4 * D))


def test_apply_refuses_weights_that_it_overwrites():
    cache = np.ones(D)
    before = bits(cache)
    with pytest.raises(AffluxError, match=r"weights and sum overlap"):
        stage = ops.CachedDifference(cache, 2, [None, None], [f32(), f32()])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32(), f32()], cache[:2]), stage))
    with pytest.raises(AffluxError, match=r"updates\[0\] and sum overlap"):
        stage = ops.CachedDifference(cache, 2, [None], [f32()])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([cache.view(np.float32)[:D]], np.ones(1)), stage))
    assert bits(cache) == before
    odd = np.frombuffer(bytearray(9), np.uint8)[1:].view(np.float64)
    with pytest.raises(AffluxError, match="weights is not aligned to 8 bytes"):
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32()], odd)))


def test_an_empty_row_is_no_missing_row():
    stage = ops.CachedDifference(np.zeros(D), 2, [np.empty(0, np.float32)], [None])
    with pytest.raises(AffluxError, match=r"rows\[0\] has 0 elements, expected 32"):
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32()], np.ones(1)), stage))


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
        with pytest.raises(AffluxError, match=rf"^\[ingest\] {name} ") as caught:
            ops.ingest(update, slot)
        assert message in str(caught.value)
    assert bits(slot) == bits(f32(value=7.0))
    with pytest.raises(AffluxError, match=r"^\[ingest\] slot "):
        ops.ingest(f32(), bad)


def test_ingest_refuses_length_overlap_and_read_only():
    with pytest.raises(AffluxError, match=r"\[ingest\] slot has 8 elements, expected 9"):
        ops.ingest(f32(D + 1), f32())
    with pytest.raises(AffluxError, match="slot is read-only"):
        ops.ingest(f32(), read_only(f32()))
    memory = f32(2 * D)
    with pytest.raises(AffluxError, match="update and slot overlap"):
        ops.ingest(memory[:D], memory[4 : 4 + D])
    with pytest.raises(AffluxError, match=r"update\[1\] and slot overlap"):
        ops.ingest([f32(2), memory[:6]], memory[4 : 4 + D])
    assert bits(memory) == bits(f32(2 * D))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([f32(3), f32(4)], "slot has 8 elements, expected 7"),
        ([], "slot has 8 elements, expected 0"),
        ([1.0] * D, r"update\[0\] is a float, expected an array"),
        ([f32(4), [f32(4)]], r"update\[1\] is a list, expected an array"),
        ([f32(4), np.ones((2, 4), np.float32)[:, ::2]], r"update\[1\] is not C-contiguous"),
        ([f32(7), np.ones((), np.int64)], r"update\[1\] is int64, expected float32, float64, float16 or bfloat16"),
    ],
)
def test_ingest_refuses_parts(parts, message):
    slot = f32(value=7.0)
    with pytest.raises(AffluxError, match=r"\[ingest\] " + message):
        ops.ingest(parts, slot)
    assert bits(slot) == bits(f32(value=7.0))


def test_ingest_refuses_a_float16_slot():
    with pytest.raises(AffluxError, match="slot is float16, expected float32, float64 or bfloat16"):
        ops.ingest(f32(), np.empty(D, np.float16))


def test_gram_refuses():
    with pytest.raises(AffluxError, match=r"\[gram\] vectors\[1\] has 9 elements, expected 8"):
        ops.gram([f32(), f32(D + 1)])
    with pytest.raises(AffluxError, match=r"\[gram\] vectors\[0\] is float16, expected float32, float64 or bfloat16"):
        ops.gram([np.ones(D, np.float16)])


def test_codecs_refuse():
    with pytest.raises(AffluxError, match=r"\[encode\] row has 31 elements, expected 32"):
        ops.encode(f32(), np.empty(31, np.uint8))
    with pytest.raises(AffluxError, match=r"\[codec\] 'int3' is unknown; known: float32, float64, "):
        ops.encode(f32(), np.empty(32, np.uint8), codec="int3")
    with pytest.raises(AffluxError, match=r"\[decode\] row is float64"):
        ops.decode(np.empty(4), f32())
    with pytest.raises(AffluxError, match=r"\[encode\] vector is float32, expected float64"):
        ops.encode(f32(), np.empty(64, np.uint8), codec="float64")
    with pytest.raises(AffluxError, match=r"\[decode\] row is not aligned to 8 bytes"):
        ops.decode(np.empty(65, np.uint8)[1:], np.empty(D), codec="float64")


@pytest.mark.parametrize(
    "call",
    [lambda n: ops.ingest(f32(), f32(), num_threads=n), lambda n: ops.gram([f32()], num_threads=n)],
)
def test_threads_below_one(call):
    for number in (0, -1):
        with pytest.raises(AffluxError, match=f"num_threads is {number}, must be an int of at least 1"):
            call(number)


def test_numbers_of_numpy_and_whole_floats_are_thread_counts():
    for number in (np.int32(2), 2.0, np.float32(2)):
        assert ops.gram([f32()], num_threads=number).tolist() == [[D]]
    row = np.empty(4 * D, np.uint8)
    ops.encode(f32(), row, num_threads=np.int64(1))
    for call in (lambda: ops.ingest(f32(), f32(), num_threads=True), lambda: ops.decode(row, f32(), num_threads=1.5)):
        with pytest.raises(AffluxError, match=r"num_threads is (True|1\.5), must be an int"):
            call()


def test_unknown_instruction_set():
    with pytest.raises(UnavailableError, match=r"'sse9', which is unknown here; known: "):
        ops.choose_isa("sse9")


def test_an_object_with_a_nonsense_device():
    class Nonsense(FakeCuda):
        def __dlpack_device__(self):
            return None

    with pytest.raises(AffluxError, match="update has a __dlpack_device__ that does not return two integers"):
        ops.ingest(Nonsense(), f32())


def test_a_gpu_array_is_refused_by_name():
    why = "this (build has no CUDA kernels|machine has no GPU that CUDA can use: .+|machine has 1 GPU)"
    with pytest.raises(UnavailableError, match=rf"\[ingest\] update is on cuda:1, but {why}$"):
        ops.ingest(FakeCuda(), f32())
    with pytest.raises(UnavailableError, match=r"\[ingest\] update\[1\] is on cuda:1"):
        ops.ingest([f32(0), FakeCuda()], f32())
