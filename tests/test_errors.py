"""Awkward input to the operations: a clear message that names operation and argument, and nothing written."""

import numpy as np
import pytest

from afflux import AffluxError, UnavailableError, ops
from conftest import bits

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
    (np.ones(D, np.float16), "is float16, expected"),
    (np.ones(D, np.int32), "expected"),
    (np.ones(D, ">f4"), "expected"),
    ([1.0] * D, "is a list, expected an array"),
    (None, "is a NoneType, expected an array"),
]
IDS = [
    "length",
    "strided",
    "reversed",
    "unaligned",
    "2d",
    "float16",
    "int32",
    "big-endian",
    "list",
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
        ops.apply(ops.Pass(f32(), out, combine, step=ops.Sgd(lr)))
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


def test_apply_refuses_overlaps():
    memory = f32(4 * D)
    a, shifted = memory[:D], memory[4 : 4 + D]
    one = np.array([0.5])
    with pytest.raises(AffluxError, match=r"(params and out|out and params) overlap"):
        ops.apply(ops.Pass(a, shifted, ops.Combine([f32()], one)))
    with pytest.raises(AffluxError, match=r"out.*overlap"):
        ops.apply(ops.Pass(f32(), a, ops.Combine([a], one)))
    with pytest.raises(AffluxError, match=r"updates\[0\].*overlap|overlap.*"):
        stage = ops.CachedDifference(np.zeros(D), 2, [None], [a])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([a], one), stage))
    with pytest.raises(AffluxError, match=r"new_rows\[0\] and new_rows\[1\] overlap"):
        stage = ops.CachedDifference(np.zeros(D), 2, [None, None], [a, a])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32(), f32()], np.array([1.0, 1.0])), stage))
    with pytest.raises(AffluxError, match=r"rows\[1\].*overlap|overlap.*"):  # a later arrival would read the new row
        stage = ops.CachedDifference(np.zeros(D), 2, [a, a], [a, None])
        ops.apply(ops.Pass(f32(), f32(), ops.Combine([f32(), f32()], np.array([1.0, 1.0])), stage))
    assert bits(memory) == bits(f32(4 * D))


def test_no_arrivals():
    params, out = f32(value=3.0), f32()
    ops.apply(ops.Pass(params, out, ops.Combine([], np.array([]))))
    assert bits(out) == bits(params)
    assert ops.gram([]).shape == (0, 0)


@pytest.mark.parametrize(("bad", "message"), BAD_VECTORS[1:], ids=IDS[1:])
def test_ingest_refuses(bad, message):
    slot = f32(value=7.0)
    with pytest.raises(AffluxError, match=r"^\[ingest\] update ") as caught:
        ops.ingest(bad, slot)
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


def test_gram_refuses():
    with pytest.raises(AffluxError, match=r"\[gram\] vectors\[1\] has 9 elements, expected 8"):
        ops.gram([f32(), f32(D + 1)])
    with pytest.raises(AffluxError, match=r"\[gram\] vectors\[0\] is float64, expected float32"):
        ops.gram([np.ones(D)])


def test_codecs_refuse():
    with pytest.raises(AffluxError, match=r"\[encode\] row has 31 elements, expected 32"):
        ops.encode(f32(), np.empty(31, np.uint8))
    with pytest.raises(AffluxError, match=r"\[codec\] 'int3' is unknown; known: float32"):
        ops.encode(f32(), np.empty(32, np.uint8), codec="int3")
    with pytest.raises(AffluxError, match=r"\[decode\] row is float64"):
        ops.decode(np.empty(4), f32())


@pytest.mark.parametrize(
    "call",
    [lambda n: ops.ingest(f32(), f32(), num_threads=n), lambda n: ops.gram([f32()], num_threads=n)],
)
def test_threads_below_one(call):
    with pytest.raises(AffluxError, match="num_threads is -1, must be at least 1"):
        call(-1)


def test_unknown_instruction_set():
    with pytest.raises(UnavailableError, match=r"'sse9', which is unknown here; known: "):
        ops.choose_isa("sse9")


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    slot = torch.zeros(D)
    assert ops.ingest(torch.full((D,), 2.0, dtype=torch.float64), slot).sum_of_squares == 4.0 * D
    assert slot.tolist() == [2.0] * D
    with pytest.raises(AffluxError, match=r"\[ingest\] update is bfloat16, expected"):
        ops.ingest(slot.bfloat16(), slot)
    with pytest.raises(AffluxError, match="update is strided"):
        ops.ingest(torch.zeros(2 * D)[::2], slot)
    with pytest.raises(AffluxError, match=r"update does not give its memory through DLPack: .*detach"):
        ops.ingest(torch.zeros(D, requires_grad=True), slot)
    with pytest.raises(AffluxError, match=r"update .*DLPack"):
        ops.ingest(torch.zeros(D, device="meta"), slot)


class FakeCuda:
    """What a GPU tensor answers before it is asked for its memory."""

    shape = (D,)

    def __dlpack_device__(self):
        return 2, 1

    def __dlpack__(self, **_):
        raise AssertionError("must not be asked")


def test_a_gpu_array_is_refused_by_name():
    with pytest.raises(
        UnavailableError,
        match=r"\[ingest\] update is on cuda:1, but this build has no CUDA kernels",
    ):
        ops.ingest(FakeCuda(), f32())
