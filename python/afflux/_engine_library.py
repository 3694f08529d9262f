"""The choice of the engine's library: that of afflux-cuda13 if it is installed and a GPU answers, else the package's.

`afflux` imports this module before `_engine`. Both libraries have the name libafflux.so, and the system's loader gives
`_engine` the one that is loaded already.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

CUDA = "afflux-cuda13"


def load_cuda() -> str:
    """Load the library of afflux-cuda13 if it is installed and a GPU answers.

    Returns:
        What `afflux backends` says of it, with the reason if the package's own library remains; empty if it is not
        installed.
    """
    try:
        spec = find_spec(CUDA.replace("-", "_"))
        for folder in (spec and spec.submodule_search_locations) or ():
            if (library := Path(folder) / "libafflux.so").exists():
                reason = no_gpu()
                if not reason:
                    ctypes.CDLL(str(library))
                return f"{CUDA} is installed, but {reason}" if reason else f"{CUDA} is loaded"
    except (OSError, ValueError) as error:  # a damaged library, a module without a spec
        return f"{CUDA} is installed, but cannot be loaded: {error}"
    return ""


def no_gpu() -> str:
    """Return why no GPU answers; empty if one does.

    NVML is asked, the driver's library for management: a CUDA call would leave forked children without CUDA.
    """
    try:
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(0)
    except OSError:
        return "this machine has no NVIDIA driver"
    try:
        status = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    except AttributeError as error:
        return f"the NVIDIA driver is too old ({error})"
    return "" if status == 0 and count.value else f"no GPU answers (NVML: status {status}, {count.value} GPUs)"


CUDA_STATE = load_cuda()
