"""The engine without Python: builds, installs, is embedded by a C++ program; its objects hold no weak symbol."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import afflux
import builds
from afflux import _engine, ops
from builds import CMAKE, PATH, built, once, run
from conftest import ROOT, found

COMPILED = [b.name for b in ops.backends() if b.device == "cpu"]
pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The tree of `make engine`."""
    return builds.engine(tmp_path_factory)


@pytest.fixture(scope="module")
def installed(release, tmp_path_factory):
    """The C++ library, as its users install it."""

    def install(folder):
        run(CMAKE, "--install", release, "--component", "engine", "--prefix", folder)

    return once(tmp_path_factory, "installed", install)


def objects_of(folder, isa):
    """The objects of an instruction set."""
    return sorted(folder.glob(f"engine/CMakeFiles/afflux_{isa}.dir/cpu/*.cpp.o"))


@pytest.fixture(scope="module")
def embedded(installed, tmp_path_factory):
    """What the embedding program prints, line by line."""
    options = [f"-DCMAKE_PREFIX_PATH={installed}"]
    folder = once(tmp_path_factory, "embed", lambda folder: built(found("embed"), folder, *options))
    lines = run(folder / "embed").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def test_the_example_in_cpp(installed, tmp_path_factory):
    """It builds against the installed engine, and its server reaches the optimum but for the clients' noise."""
    options = [f"-DCMAKE_PREFIX_PATH={installed}"]
    folder = once(tmp_path_factory, "example", lambda folder: built(ROOT / "examples" / "cpp", folder, *options))
    rounds, distance = re.fullmatch(
        r"(\d+) rounds, mean squared distance from the optimum (.*)\n", run(folder / "example")
    ).groups()
    assert int(rounds) == 50
    assert float(distance) < 1e-3


UNITS = {
    "apply": ["apply"],
    "codec": ["asks", "code_runs", "decode", "encode"],
    "fused": ["apply_fused", "can_fuse"],
    "gram": ["gram"],
    "ingest": ["ingest"],
    "inner": ["inner"],
    "kernels": ["kernels"],
    "unflatten": ["unflatten"],
}


def check_symbols(objects, isa):
    """Each unit exports its functions and nothing weak, and calls only those of its own instruction set."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    assert [path.name for path in objects] == [f"{unit}.cpp.o" for unit in UNITS]
    for path in objects:
        lines = run(nm, "-C", path).splitlines()
        symbols = [re.match(r"(?:[0-9a-f]+ |\s+)([A-Za-z]) ([^(]*)", line).groups() for line in lines]
        assert not [name for kind, name in symbols if kind in "WwVvu"], path
        exported = [name for kind, name in symbols if kind.isupper() and kind != "U"]
        assert sorted(exported) == [f"afflux::{isa}::{name}" for name in UNITS[path.name.removesuffix(".cpp.o")]]
        others = {name for kind, name in symbols if kind == "U" and not name.startswith(f"afflux::{isa}::")}
        assert others <= {"memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_"}, path


@pytest.mark.parametrize("isa", COMPILED)
def test_an_instruction_sets_objects_export_their_functions_and_nothing_weak(isa, release):
    check_symbols(objects_of(release, isa), isa)


@pytest.mark.soak
@pytest.mark.parametrize("isa", COMPILED)
def test_so_they_do_without_optimisation(isa, tmp_path):
    """Inlining hides weak symbols."""
    debug = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]  # without its tables for debuggers
    built(ROOT, tmp_path, "-DAFFLUX_CUDA=off", *debug, targets=[f"afflux_{isa}"])
    check_symbols(objects_of(tmp_path, isa), isa)


def test_no_local_of_the_engine_is_initialized_behind_a_lock(release):
    """A child that is forked amid such an initialization would wait for its end for ever."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    objects = sorted(release.glob("engine/CMakeFiles/engine.dir/**/*.o"))
    assert objects
    assert not [path for path in objects if "__cxa_guard_acquire" in run(nm, path)]


FEATURES = {
    "sse42": {"sse4_2"},
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"},
}


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="x86-64 on Linux")
def test_the_processors_features_are_those_of_the_system(tmp_path):
    """cpuid and xgetbv against Linux's own reading of them; the engine chooses its instruction set by them."""
    calls = "".join(f'  std::printf("{name} %d\\n", afflux::features::{name}());\n' for name in FEATURES)
    source, program = tmp_path / "features.cpp", tmp_path / "features"
    source.write_text(f'#include <cstdio>\n#include "cpu/features.hpp"\nint main() {{\n{calls}}}\n')
    run(os.environ.get("CXX", "c++"), "-std=c++17", f"-I{ROOT / 'engine'}", source, "-o", program)
    (flags,) = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    expected = {name: str(int(wanted <= set(flags.split()))) for name, wanted in FEATURES.items()}
    assert dict(line.split() for line in run(program).splitlines()) == expected
    best = next((name for name in ("avx512", "avx2") if expected[name] == "1"), "baseline")
    if {"avx512", "avx2"} <= set(COMPILED):
        assert next(b.name for b in ops.backends() if b.runs) == best


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
    ops.apply(ops.Pass(params, out, combine, step=ops.Step("sgd", 0.7)))
    assert embedded["fedbuff"] == embedded["fedbuff_of_parts"] == checksum(out)
    stage = ops.CachedDifference(cache, 10, [None, None], [row, None])
    ops.apply(ops.Pass(params, out, combine, stage, ops.Step("sgd", 0.7)))
    assert embedded["ca2fl"] == checksum(out)
    elementary = [afflux.exp(0.1), afflux.log(0.1), afflux.pow(0.1, 0.3)]
    assert [float.fromhex(value) for value in embedded["elementary"].split()] == elementary
    held, states = [lcg_vector(4)], [np.zeros_like(params), np.full_like(params, 0.25)]
    rule_vectors = ops.RuleVectors(held, np.array([0.5]), np.array([[0.5, 0.0, 0.25]]))
    mean = ops.CachedMean(cache, 10, [None, None], [row, None])
    yogi = ops.Step("yogi", 0.7, 0.9, 0.99, 1e-3)
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
        assert "must be auto, on, release or off" in done.stderr
