"""A GPU for tests: torch's, where there is one; else the emulated one (emulated.py), in processes that have it."""

import importlib.util
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from afflux import ops

emulated = sys.modules.get("emulated")
(BACKEND,) = [backend for backend in ops.backends() if backend.name == "cuda"]

#: Marks what needs a GPU.
needs_device = pytest.mark.skipif(not BACKEND.runs, reason=f"no GPU: {BACKEND.why_not}")


def put(array, dtype=None):
    """A copy of a NumPy array on the device, at the same offset from an aligned address; bfloat16 comes as uint16."""
    dtype = dtype or array.dtype.name
    room = np.empty(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + array.ctypes.data % 64
    copy = room[begin : begin + array.nbytes].view(array.dtype)
    copy[:] = array
    if emulated:
        return emulated.OnCuda(copy, dtype)
    import torch

    moved = torch.from_numpy(room).cuda()
    assert moved.data_ptr() % 64 == 0
    begin = array.ctypes.data % 64
    return moved[begin : begin + array.nbytes].copy_(torch.from_numpy(copy.view(np.uint8))).view(getattr(torch, dtype))


def get(moved, dtype):
    """Its bytes, as NumPy's `dtype`."""
    if emulated:
        return moved.array.view(dtype)
    import torch

    return moved.view(torch.uint8).cpu().numpy().view(dtype)


def libraries():
    """Functions by name that copy a NumPy array to the device, into an array of that library."""
    if emulated:
        import fake_cupy
        import fake_torch

        fake_cupy.install()
        fake_torch.install()
        return {"cupy": fake_cupy.asarray, "torch": fake_torch.moved}
    found = {"torch": lambda array: __import__("torch").tensor(array, device="cuda")}
    if BACKEND.runs and importlib.util.find_spec("cupy"):
        found["cupy"] = lambda array: __import__("cupy").asarray(array)
    return found


def on_host():
    """Within it, NumPy's arrays are on the CPU."""
    return emulated.on_host() if emulated else nullcontext()
