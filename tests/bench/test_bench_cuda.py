"""The benchmark's rows on a GPU: the CPU's formulas, contenders and bits."""

import json
import sys
from importlib.machinery import ModuleSpec
from time import perf_counter
from types import ModuleType

import numpy as np
import pytest
import torch

from bench import cuda
from bench.measure.timing import entrant
from bench.output import tables
from bench.spec import inputs
from bench.spec.arrays import Gpu
from conftest import raising
from device import emulated, libraries, needs_device, on_host

D = 5003


@pytest.fixture
def place():
    with on_host():
        yield Gpu(libraries()["torch"]) if emulated else cuda.here()


def contenders(row):
    return [c for c in cuda.ROWS[row].contenders if not (c.numpy or c.compiles)]


@needs_device
@pytest.mark.parametrize("row", cuda.ROWS)
def test_afflux_gives_the_bits_of_the_cpu(row, place):
    assert cuda.same_bits(cuda.ROWS[row], cuda.case_of(cuda.ROWS[row], D), place)


def errors(row, by, place):
    case = cuda.case_of(cuda.ROWS[row], D)
    return entrant(case, cuda.ROWS[row], by, inputs.make(case, 1, place)).errors


@needs_device
@pytest.mark.parametrize("row", cuda.ROWS)
def test_everyone_does_there_what_it_does_on_the_cpu(row, place):
    """The errors are of the same size, and not those of another formula."""
    for by in contenders(row):
        alike(errors(row, by, place), errors(row, by, inputs.HOST))


def alike(theirs, mine):
    """Sums in another order, or other random bits, and no other formula."""
    assert theirs.keys() == mine.keys()
    for name, error in theirs.items():
        # The largest value of h has the errors of two roundings, by other random bits on a GPU.
        rel = 0.25 if name == "h" else 0.05
        assert error["terms"] == pytest.approx(mine[name]["terms"], rel=rel), name
        assert error["abs"] <= max(4 * mine[name]["abs"], 1e-5 * error["terms"]), name


class AsCuPy(np.ndarray):
    """NumPy's arrays, whose extremes are arrays as CuPy's are."""

    def get(self):
        return np.array(self)

    def min(self, *_, **__):
        return np.asarray(self).min(keepdims=True)[0:1].reshape(()).view(AsCuPy)

    def max(self, *_, **__):
        return np.asarray(self).max(keepdims=True)[0:1].reshape(()).view(AsCuPy)


@pytest.fixture
def cupy(monkeypatch):
    """NumPy in CuPy's place."""
    module = ModuleType("cupy")
    module.__dict__.update(vars(np), ndarray=AsCuPy, __spec__=ModuleSpec("cupy", None))
    module.from_dlpack = lambda tensor: tensor.as_subclass(torch.Tensor).numpy().view(AsCuPy)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.skipif(emulated is None, reason="CuPy's place is taken by NumPy on the emulated device")
@pytest.mark.parametrize("row", cuda.cupy_contenders.CONTENDERS)
def test_cupy_computes_the_same(row, place, cupy):
    plain = next(c for c in contenders(row) if c.role == "plain")
    alike(errors(row, cuda.cupy_contenders.CONTENDERS[row], place), errors(row, plain, inputs.HOST))


class Event:
    def __init__(self, **_):
        pass

    def record(self):
        self.seconds = perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.seconds - self.seconds)


@pytest.fixture
def device(monkeypatch, cupy):
    """What torch.cuda has on a GPU; its graphs make the call anew."""
    monkeypatch.setattr(torch.cuda, "Event", Event, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "emulated", raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**24, 2**34), raising=False)
    monkeypatch.setattr(cuda, "captured", lambda call: call)
    monkeypatch.setattr(cuda, "kernels_alone", lambda timed: {"sweep": 1e-3} if timed.by.role == "ours" else {})
    monkeypatch.setattr(cuda, "CHECKED", 2049)


@pytest.mark.skipif(emulated is None, reason="make gpu measures")
def test_a_run(place, device, monkeypatch):
    rows = ["fedbuff", "mf-ca2fl-affine-4", "wkafl"]

    broken = raising(RuntimeError, "no such instruction")
    monkeypatch.setitem(
        cuda.cupy_contenders.CONTENDERS, "wkafl", cuda.replace(cuda.cupy_contenders.CONTENDERS["wkafl"], make=broken)
    )
    out = cuda.run([D, 10**6], place, 2, rows, compiled=False)
    json.dumps(out)
    assert out["settings"]["notes"][:2] == ["all rows have the CPU's bits", "errors are those at d = 2_049"]
    short, long = out["cases"]
    assert (short["d"], short["device"]) == (D, "cuda")
    assert D < long["d"] < 10**6
    assert f"d = {long['d']:_} in place of 1_000_000, which this GPU's memory does not hold" in out["settings"]["notes"]
    assert sum(n == "wkafl: CuPy failed: RuntimeError: no such instruction" for n in out["settings"]["notes"]) == 2
    for row in rows:
        names = [c.name for c in contenders(row)]
        names += [f"{cuda.GRAPHED[row]}, in a CUDA graph"] if row in cuda.GRAPHED else []
        lines = short["rows"][row]
        assert [line["name"] for line in lines] == names + ["CuPy"] * (row != "wkafl")
        assert (lines[0]["isa"], lines[0]["device"]) == ("cuda", "cuda")
        assert short["limits"][row]["gbps"] >= max(probe["gbps"] for probe in short["probes"])
        for line in lines:
            assert len(line["seconds"]) == 2
            assert line["errors"]
    assert {probe["name"] for probe in short["probes"]} == {f"torch {n}" for n in ("copy_", "add", "mul_", "sum", "mv")}
    assert [line["name"].split(":")[0] for line in out["launches"]] == ["torch zero_", "torch zero_, item()"] + [
        "afflux"
    ] * 3
    text = tables.to_markdown(out, tables.tables(out, [cuda.ROWS[row] for row in rows]))
    assert text.startswith("emulated; ")
    assert "Launches" in text


@pytest.mark.skipif(emulated is None, reason="make gpu measures")
def test_other_bits_are_told(place, device, monkeypatch):
    other = cuda.replace(cuda.ROWS["fedbuff"].contenders[0], make=lambda shared: made[shared.place is place](shared))
    made = [cuda.ROWS["fedbuff"].contenders[0].make, next(c for c in contenders("fedbuff") if c.role == "plain").make]
    row = cuda.replace(cuda.ROWS["fedbuff"], contenders=[other])
    monkeypatch.setitem(cuda.ROWS, "fedbuff", row)
    assert cuda.run([D], place, 1, ["fedbuff"])["settings"]["notes"][0] == "NOT THE CPU'S BITS: fedbuff"
