"""Awkward input to the operations: a clear message that names operation and argument, and nothing written."""

import ctypes
from multiprocessing import RawArray

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


class Fresh:
    """A sequence that makes its items on the fly: nobody but the engine holds them."""

    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return np.full(self.size, i + 1, np.float32)


def test_sequences_that_make_their_items():
    gram = ops.gram(Fresh(7, 3000))
    assert gram.tolist() == [[3000.0 * (i + 1) * (j + 1) for j in range(7)] for i in range(7)]
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert ops.gram(matrix).tolist() == (matrix.astype(np.float64) @ matrix.T).tolist()
    out = f32(4)
    ops.apply(ops.Pass(np.zeros(4, np.float32), out, ops.Combine(matrix, np.array([1.0, 0.0, 2.0]))))
    assert out.tolist() == [16.0, 19.0, 22.0, 25.0]


def test_ctypes_and_shared_memory():
    for make in (ctypes.c_float * D, lambda *values: RawArray("f", values)):
        source, slot = make(*range(D)), make(*[0.0] * D)
        assert ops.ingest(source, slot).max == D - 1
        assert list(slot) == list(range(D))


class Exporter:
    """DLPack only, with a choice of protocol version."""

    def __init__(self, array, versioned):
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("no such argument")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(versioned):
    memory = np.arange(20, dtype=np.float32)
    slot = np.empty(8, np.float32)
    ops.ingest(Exporter(memory[4:12], versioned), Exporter(slot, versioned))
    assert slot.tolist() == list(range(4, 12))
    with pytest.raises(AffluxError, match="update is strided"):
        ops.ingest(Exporter(memory[::2], versioned), f32(10))
    with pytest.raises(AffluxError, match="update has 2 dimensions"):
        ops.ingest(Exporter(memory.reshape(4, 5), versioned), f32(20))
    with pytest.raises(AffluxError, match=r"slot (is read-only|does not give)"):
        ops.ingest(memory, Exporter(read_only(f32(20)), versioned))


def test_torch_offsets():
    torch = pytest.importorskip("torch")
    slot = f32(4)
    ops.ingest(torch.arange(10, dtype=torch.float32)[3:7], slot)
    assert slot.tolist() == [3, 4, 5, 6]


def test_an_object_with_a_nonsense_device():
    class Nonsense(FakeCuda):
        def __dlpack_device__(self):
            return None

    with pytest.raises(AffluxError, match="update has a __dlpack_device__ that does not return two integers"):
        ops.ingest(Nonsense(), f32())


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
    for number in (0, -1):
        with pytest.raises(AffluxError, match=f"num_threads is {number}, must be at least 1"):
            call(number)


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
