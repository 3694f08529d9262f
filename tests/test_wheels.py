"""The check of a wheel's contents (.ci/wheels), which `make wheels` runs on each wheel."""

import platform
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from afflux import _engine
from scripts import script

PACKAGE = Path(_engine.__file__).parent


@pytest.fixture(scope="module")
def wheels():
    return script("wheels")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_what_a_wheel_lacks_or_has_beside_its_files_is_named(wheels, tmp_path):
    """A wheel for this Python with the libraries of the tree, which need the system's C++ library."""
    tag = "cp{}{}".format(*sys.version_info)
    wheel = tmp_path / f"afflux-0.1.0-{tag}-{tag}-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    extension = f"_engine.cpython-{tag[2:]}-x86_64-linux-gnu.so"
    if Path(_engine.__file__).name != extension:
        pytest.skip("the tree is not one for x86-64 on Linux")
    info = "afflux-0.1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in {*(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")), *wheels.DATA, extension}:
            if name not in ("py.typed", "rules/rule.py"):
                archive.write(PACKAGE / name, f"afflux/{name}")
        archive.writestr("afflux/notes.txt", "left there")
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"):
            archive.writestr(f"{info}/{name}", "")
    faults = wheels.faults(wheel)
    assert faults[:5] == [
        "has afflux/notes.txt",
        "lacks afflux-0.1.0.dist-info/licenses/licenses/libcxx.txt",
        "lacks afflux-0.1.0.dist-info/licenses/licenses/pybind11.txt",
        "lacks afflux/py.typed",
        "lacks afflux/rules/rule.py",
    ]
    assert "afflux/libafflux.so needs libstdc++.so.6" in faults
    assert not [fault for fault in faults if "exports" in fault or "is not for" in fault or "beside it" in fault]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_what_is_wrong_with_a_wheel_of_cuda_is_named(wheels, tmp_path):
    """A file beside the library, a requirement of any version, and a tag for an older glibc than the library needs."""
    wheel = tmp_path / f"afflux_cuda13-0.1.0-py3-none-manylinux_2_5_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(PACKAGE / "libafflux.so", "afflux_cuda13/libafflux.so")
        archive.writestr("afflux_cuda13/notes.txt", "left there")
        archive.writestr("afflux_cuda13-0.1.0.dist-info/METADATA", "Version: 0.1.0\nRequires-Dist: afflux>=0.1\n")
    faults = wheels.cuda_faults(wheel)
    assert faults[:2] == ["has afflux_cuda13/notes.txt", "does not require afflux of its version"]
    assert any(fault.startswith("afflux_cuda13/libafflux.so needs glibc ") for fault in faults)
