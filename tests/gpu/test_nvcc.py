"""The CUDA code that `make cuda` has compiled into build/cuda, with every warning as an error."""

import re

import pytest

import machine_code
from builds import CMAKE, run
from conftest import ROOT

BUILT = ROOT / "build" / "cuda"
pytestmark = pytest.mark.nvcc


def test_every_source_is_compiled():
    objects = {path.name for path in BUILT.glob("engine/CMakeFiles/afflux_cuda.dir/cuda/*.o")}
    assert objects == {f"{path.name}.o" for path in (ROOT / "engine" / "cuda").glob("*.cu")}


def test_the_kernels_keep_to_registers_and_whole_lines():
    """Read from the machine code, if CUDA's cuobjdump is there."""
    if machine_code.CUOBJDUMP is None:
        pytest.skip("cuobjdump is not installed: no machine code was read")
    (found,) = machine_code.read(BUILT / "engine" / "libafflux.a")
    assert found.name == "sm_80"
    assert len(found.kernels) > 50
    assert (found.local, found.generic) == (0, 0)
    assert len([*found.reached]) == len(machine_code.REACHED), "a kernel has another name"
    assert found.misses == []
    assert min(found.wide_loads, found.wide_stores) > 500


def test_releases_are_for_every_generation(tmp_path):
    run(CMAKE, "-S", ROOT, "-B", tmp_path, "-G", "Unix Makefiles", "-DAFFLUX_CUDA=release")
    flags = (tmp_path / "engine/CMakeFiles/afflux_cuda.dir/flags.make").read_text()
    assert re.findall(r"code=\[(.*?)\]", flags) == ["compute_80,sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
