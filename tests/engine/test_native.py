"""The engine without Python: builds, installs, is embedded by a C++ program; its objects hold no weak symbol."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import afflux
import machine_code
from afflux import _engine, ops
from builds import CMAKE, PATH, built, once, run
from conftest import ROOT, found

NVCC = shutil.which("nvcc", path=PATH) or shutil.which("nvcc", path="/usr/local/cuda/bin")
pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The engine as its users build it (CUDA code too where nvcc is found), installed beside the build."""

    def make(folder):
        built(ROOT, folder, "-DAFFLUX_CUDA=auto")
        run(CMAKE, "--install", folder, "--prefix", folder / "installed")

    return once(tmp_path_factory, "release", make)


@pytest.fixture(scope="module")
def debug(tmp_path_factory):
    """The objects of the instruction sets alone."""
    targets = [f"afflux_{b.name}" for b in ops.backends() if b.device == "cpu"]
    options = "-DAFFLUX_CUDA=off", "-DCMAKE_BUILD_TYPE=Debug"
    return once(tmp_path_factory, "debug", lambda folder: built(ROOT, folder, *options, targets=targets))


@pytest.fixture(scope="module")
def embedded(release, tmp_path_factory):
    """What the embedding program prints, line by line."""
    options = [f"-DCMAKE_PREFIX_PATH={release / 'installed'}"]
    folder = once(tmp_path_factory, "embed", lambda folder: built(found("embed"), folder, *options))
    lines = run(folder / "embed").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def test_the_example_in_cpp(release, tmp_path_factory):
    """It builds against the installed engine, and its server reaches the optimum but for the clients' noise."""
    options = [f"-DCMAKE_PREFIX_PATH={release / 'installed'}"]
    folder = once(tmp_path_factory, "example", lambda folder: built(ROOT / "examples" / "cpp", folder, *options))
    rounds, distance = re.fullmatch(
        r"(\d+) rounds, mean squared distance from the optimum (.*)\n", run(folder / "example")
    ).groups()
    assert int(rounds) == 50
    assert float(distance) < 1e-3


@pytest.mark.parametrize("kind", ["release", "debug"])
def test_an_instruction_sets_object_exports_its_table_and_nothing_weak(kind, request):
    folder = request.getfixturevalue(kind)
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    objects = sorted(folder.glob("engine/CMakeFiles/afflux_*.dir/cpu/kernels.cpp.o"))
    compiled = sorted(b.name for b in ops.backends() if b.device == "cpu")
    assert [o.parts[-3] for o in objects] == [f"afflux_{name}.dir" for name in compiled]
    for path in objects:
        symbols = [line.split() for line in run(nm, "-C", path).splitlines()]
        weak = [s for s in symbols if s[-2] in "WwVvu" or (len(s) > 2 and s[1] in "WwVvu")]
        assert not weak, f"{path.name}: {weak}"
        exported = [s[2:] for s in symbols if len(s) > 2 and s[1].isupper()]
        assert [" ".join(name) for name in exported] == [f"afflux::{path.parts[-3][7:-4]}::kernels"]
        called = {s[1] for s in symbols if s[0] == "U"}
        assert called <= {"memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_"}, path


def lcg_vector(seed, size=70001):
    """The generator of embed/main.cpp."""
    state, values = seed, np.empty(size, np.int64)
    for i in range(size):
        state = (state * 1664525 + 1013904223) % 2**32
        values[i] = state
    return (np.where(values < 2**31, values, values - 2**32).astype(np.float32) * np.float32(2.0**-30)).astype(
        np.float32
    )


def checksum(values):
    total = 0
    for value in values.view(np.uint32).tolist():
        total = (total * 31 + value) % 2**32
    return f"{total:08x}"


def test_the_embedded_engine_gives_the_python_packages_bits(embedded):
    params, first, second = (lcg_vector(seed) for seed in (1, 2, 3))
    out, row, cache = np.empty_like(params), np.empty_like(params), np.full(params.size, 0.125)
    combine = ops.Combine([first, second], np.array([0.5, 0.5]))
    ops.apply(ops.Pass(params, out, combine, step=ops.Sgd(0.7)))
    assert embedded["fedbuff"] == checksum(out)
    stage = ops.CachedDifference(cache, 10, [None, None], [row, None])
    ops.apply(ops.Pass(params, out, combine, stage, ops.Sgd(0.7)))
    assert embedded["ca2fl"] == checksum(out)
    elementary = [afflux.exp(0.1), afflux.log(0.1), afflux.pow(0.1, 0.3)]
    assert [float.fromhex(value) for value in embedded["elementary"].split()] == elementary
    held, states = [lcg_vector(4)], [np.zeros_like(params), np.full_like(params, 0.25)]
    rule_vectors = ops.RuleVectors(held, np.array([0.5]), np.array([[0.5, 0.0, 0.25]]))
    mean = ops.CachedMean(cache, 10, [None, None], [row, None])
    yogi = ops.Adaptive("yogi", 0.7, 0.9, 0.99, 1e-3)
    ops.apply(ops.Pass(params, out, combine, mean, yogi, states, rule_vectors))
    assert embedded["yogi"].split() == [checksum(out), checksum(held[0])]
    rounded = ops.ingest(first, _engine.Buffer(_engine.Pool(first.size, "bfloat16", 1))).sum_of_squares
    same, squares = embedded["parts"].split()
    assert (same, float.fromhex(squares)) == ("1", rounded)
    products = [float.fromhex(value) for value in embedded["gram"].split()]
    assert products == ops.gram([first, second])[0].tolist()


def test_the_embedded_engine_throws_and_tells(embedded):
    assert embedded["error"] == "[apply] weights has 1 entries, updates has 2"
    assert embedded["chosen"] in [b.name for b in ops.backends() if b.runs]


def test_the_kernels_compile_for_cuda(release):
    """Compiles without a warning. A warning would also report an array that is not kept in registers."""
    if NVCC is None:
        pytest.skip("nvcc is not installed: the CUDA code was not compiled")
    sources = (ROOT / "engine/cuda").glob("*.cu")
    assert all(release.joinpath("engine/CMakeFiles/afflux_cuda.dir/cuda", f"{s.name}.o").exists() for s in sources)


def test_the_kernels_keep_to_registers_and_whole_lines(release):
    """Read from the machine code, if CUDA's cuobjdump is there."""
    if NVCC is None or machine_code.CUOBJDUMP is None:
        pytest.skip("nvcc or cuobjdump is not installed: no machine code was read")
    (found,) = machine_code.read(next(release.glob("engine/libafflux.a")))
    assert found.name == "sm_80"
    assert found.kernels > 50
    assert (found.local, found.generic) == (0, 0)
    assert min(found.wide_loads, found.wide_stores) > 500


def test_releases_are_for_every_generation(tmp_path):
    if NVCC is None:
        pytest.skip("nvcc is not installed")
    run(CMAKE, "-S", ROOT, "-B", tmp_path, "-G", "Unix Makefiles", "-DAFFLUX_CUDA=release")
    flags = (tmp_path / "engine/CMakeFiles/afflux_cuda.dir/flags.make").read_text()
    assert re.findall(r"code=\[(.*?)\]", flags) == [
        *("compute_80,sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    ]


@pytest.mark.parametrize(("choice", "code"), [("auto", 0), ("on", 1), ("release", 1), ("off", 0), ("perhaps", 1)])
def test_without_nvcc(tmp_path, choice, code):
    """`auto` and `off` build without CUDA; `on` and `release` end with an error about the missing part."""
    hidden = [folder for folder in PATH.split(os.pathsep) if not Path(folder, "nvcc").exists()]
    env = os.environ | {"PATH": os.pathsep.join(hidden)}
    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME"):
        env.pop(name, None)
    command = [CMAKE, "-S", ROOT, "-B", tmp_path, f"-DAFFLUX_CUDA={choice}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    if choice in ("on", "release"):
        assert f"AFFLUX_CUDA={choice}, but no CUDA compiler was found" in done.stderr
    if choice == "perhaps":
        assert "must be auto, on, release, off or emulated" in done.stderr
