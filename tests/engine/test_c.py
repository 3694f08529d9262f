"""The C interface: programs in C, C++ and Rust against the library and the CMake files of the Python package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import afflux
from afflux import _engine, ops
from afflux.ops import codecs
from builds import CMAKE, built, once, run
from conftest import ROOT, found
from test_native import checksum, lcg_vector

PACKAGE = Path(afflux.__file__).parent
LIBRARY = PACKAGE / "libafflux.so"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the programs in C and in C++, built as a user builds them."""
    if CMAKE is None:
        pytest.skip("cmake is not installed")
    folder = run(sys.executable, "-m", "afflux", "--cmakedir").strip()
    return once(
        tmp_path_factory, "c_users", lambda build: built(found("main.c").parent, build, f"-Dafflux_DIR={folder}")
    )


def test_a_program_in_c_has_the_bits_of_the_package(programs):
    lines = dict(line.split(" ", 1) for line in run(programs / "in_c").splitlines())
    params, first, second = (lcg_vector(seed) for seed in (1, 2, 3))
    out = np.empty_like(params)
    assert lines["version"] == afflux.__version__
    assert lines["order_version"] == str(_engine.ORDER_VERSION)
    assert lines["isa"] in [backend.name for backend in ops.backends() if backend.runs]
    facts = ops.ingest(first, out)
    assert [float.fromhex(lines["ingest"].split()[0]), lines["ingest"].split()[1]] == [facts.sum_of_squares, "-1"]
    ops.apply(ops.Pass(params, out, ops.Combine([first, second], np.array([0.5, 0.5])), step=ops.Step("sgd", 0.7)))
    assert lines["apply"] == f"1 {checksum(out)}"
    assert [float.fromhex(word) for word in lines["gram"].split()] == ops.gram([first, second])[0].tolist()
    inner = ops.inner([first, second], np.array([0.5, 0.5]))
    assert [float.fromhex(word) for word in lines["inner"].split()] == [inner.square, inner.products[0]]
    codec = codecs.affine(4)
    row = np.zeros(codec.row_bytes(first.size), np.uint8)
    ops.encode(first, row, codec=codec, facts=ops.RowFacts(7))
    ops.decode(row, out, codec=codec)
    assert lines["row"] == f"{row.size} {checksum(row[: row.size // 4 * 4].view(np.float32))} {checksum(out)}"
    assert float.fromhex(lines["pow"]) == afflux.pow(0.1, 0.3)
    assert lines["kind"] == "1 [afflux.h] step.kind is 99, must be from 0 to 6"
    assert lines["codec"] == "1"
    assert (lines["status"], lines["error"]) == ("1", "[apply] weights has 1 entries, updates has 2")


def test_a_program_in_cpp(programs):
    assert run(programs / "in_cpp") == "1 4\n"


def test_a_program_in_rust(tmp_path):
    cargo = shutil.which("cargo")
    if cargo is None or subprocess.run([cargo, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("cargo is not installed, or has no toolchain")
    shutil.copytree(found("Cargo.toml").parent, tmp_path / "rust")
    environment = {"AFFLUX": str(PACKAGE), "CARGO_TARGET_DIR": str(tmp_path / "target")}
    text = run(cargo, "run", "--quiet", "--offline", "--manifest-path", tmp_path / "rust" / "Cargo.toml", **environment)
    assert text.splitlines() == ["[5.0, 10.0, 10.0, 20.0]", "1", "[gram] out has 3 elements, expected 4"]


def test_the_library_exports_the_functions_of_its_headers_and_nothing_else():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    names = {line.split()[-1] for line in run(nm, "-D", "--defined-only", LIBRARY).splitlines()}
    headers = [ROOT / "engine" / name for name in ("include/afflux.h", "c/internal.h")]
    declared = re.findall(r"^AFFLUX_API [^(]*?\b(afflux_\w+)\(", "".join(h.read_text() for h in headers), re.MULTILINE)
    assert names == set(declared)


def test_a_library_of_another_version_is_refused(tmp_path):
    """LD_LIBRARY_PATH comes before the folder of the extension."""
    compiler, nm = shutil.which("cc"), shutil.which("nm")
    if compiler is None or nm is None or sys.platform == "darwin":
        pytest.skip("cc or nm is not installed")
    names = [line.split()[-1] for line in run(nm, "-D", "--defined-only", LIBRARY).splitlines()]
    functions = {name: f"int {name}(void) {{ return 1; }}" for name in names}
    functions["afflux_version"] = 'const char *afflux_version(void) { return "9.9.9"; }'
    (tmp_path / "other.c").write_text("\n".join(functions.values()))
    run(compiler, "-shared", "-fPIC", "-w", tmp_path / "other.c", "-o", tmp_path / "libafflux.so")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", "import afflux"], env=environment, capture_output=True, text=True)
    assert f"afflux {afflux.__version__} has loaded a libafflux.so of version 9.9.9" in done.stderr


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("sys.platform = 'win32'", "does not support Windows"),
        ("sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1", "does not support free-threaded Python"),
    ],
)
def test_systems_that_are_not_supported_are_refused_before_the_build(setting, reason):
    setup = (ROOT / "setup.py").read_text()
    code = f"import sys, sysconfig, types\nsys.modules['setuptools'] = types.SimpleNamespace(setup=None)\n{setting}\n"
    done = subprocess.run([sys.executable, "-c", code + setup], capture_output=True, text=True)
    assert done.returncode == 1
    assert reason in done.stderr
