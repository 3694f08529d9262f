"""The C interface: programs in C, C++ and Rust against the library and the CMake files of the Python package."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import afflux
from afflux import Server, _engine, ops
from afflux._engine import STEP_KINDS
from afflux.ops import codecs
from afflux.rules import fedbuff
from afflux.rules.staleness import Polynomial
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
    assert lines["kind"] == f"1 [afflux.h] step.kind is 99, must be from 0 to {len(STEP_KINDS) - 1}"
    assert lines["codec"] == "1"
    assert (lines["status"], lines["error"]) == ("1", "[apply] weights has 1 entries, updates has 2")


def test_a_server_in_c_has_the_bits_of_the_package(programs):
    state, size = 1, 1000

    def next_number():
        nonlocal state
        state = (state * 1664525 + 1013904223) % 2**32
        return state

    rule = fedbuff(buffer_size=7, staleness=Polynomial(0.3))
    server = Server(rule, np.zeros(size, np.float32), duplicates="both", max_staleness=5)
    for _ in range(1000):
        client, stale = next_number() >> 28, (next_number() >> 24) % 7
        update = np.array([next_number() for _ in range(size)], np.uint32).view(np.int32).astype(np.float32)
        whose = {"client": ["ann", "bob"][client] if client < 2 else client, "version": max(0, server.version - stale)}
        server.push(**whose, update=update * np.float32(2.0**-30))
    counts = f"{server.counts['joined']} {server.counts['dropped']}"
    assert run(programs / "fedbuff_in_c") == f"{checksum(server.params)} {server.version} {counts}\n"
    assert server.counts["dropped"] > 100


class Settings(ctypes.Structure):
    _fields_ = [
        ("buffer_size", ctypes.c_int64),
        ("duplicates", ctypes.c_int32),
        ("by_flush", ctypes.c_uint8),
        ("limits_staleness", ctypes.c_uint8),
        ("max_staleness", ctypes.c_int64),
        ("pass_clients", ctypes.c_int64),
        ("participations", ctypes.c_int64),
    ]


class Push(ctypes.Structure):
    _fields_ = [
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_int64),
        ("is_unsigned", ctypes.c_uint8),
        ("version", ctypes.c_int64),
        ("examples", ctypes.c_int64),
        ("local_steps", ctypes.c_int64),
        ("loss", ctypes.c_double),
        ("norm", ctypes.c_double),
        ("slot", ctypes.c_int64),
    ]


class Decision(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int32), ("completes", ctypes.c_uint8)] + [
        (name, ctypes.c_int64) for name in ("staleness", "version", "join", "step", "freed")
    ]


class Arrivals(ctypes.Structure):
    _fields_ = [("size", ctypes.c_int64)] + [
        (name, ctypes.POINTER(ctypes.c_int64))
        for name in ("slots", "versions", "stalenesses", "joins", "examples", "local_steps")
    ]
    _fields_ += [(name, ctypes.POINTER(ctypes.c_double)) for name in ("losses", "norms")]


class Control:
    """A control of the library, whose functions raise ValueError with their message."""

    def __init__(self, **settings):
        self.library = ctypes.CDLL(LIBRARY)
        self.library.afflux_last_error.restype = ctypes.c_char_p
        self.library.afflux_control_version.restype = ctypes.c_int64
        self.library.afflux_control_destroy.restype = None
        self.pointer = ctypes.c_void_p()
        self.checked(self.library.afflux_control_create(ctypes.byref(Settings(**settings)), ctypes.byref(self.pointer)))

    def __del__(self):
        self.library.afflux_control_destroy(self.pointer)

    def checked(self, status):
        if status:
            raise ValueError(f"{status} {self.library.afflux_last_error().decode()}")

    def call(self, name, *arguments):
        self.checked(getattr(self.library, f"afflux_control_{name}")(self.pointer, *arguments))

    def push(self, client, version, examples=1, slot=0, **facts):
        decision, is_text = Decision(), isinstance(client, str)
        push = Push(client.encode() if is_text else None, 0 if is_text else client, version=version, **facts)
        push.examples, push.slot, push.is_unsigned = examples, slot, not is_text and client >= 2**63
        self.call("push", ctypes.byref(push), ctypes.byref(decision))
        return decision

    def arrivals(self, name):
        arrivals = Arrivals()
        self.call("arrivals", ctypes.byref(arrivals))
        return getattr(arrivals, name)[: arrivals.size]

    def number(self, name, *arguments, kind=ctypes.c_int64):
        number = kind(-1)
        self.call(name, *arguments, ctypes.byref(number))
        return number.value

    @property
    def version(self):
        return self.library.afflux_control_version(self.pointer)

    def counts(self):
        counts, since = (ctypes.c_int64 * 9)(), (ctypes.c_int64 * 9)()
        self.call("counts", counts, since)
        return [*counts], [*since]


def test_control_in_c():
    control = Control(buffer_size=4, duplicates=1, limits_staleness=1, max_staleness=1)
    pushes = [("b", 10), (2**63 + 1, 11), (5, 12), (-1, 13)]
    for client, slot in pushes[:3]:
        decision = control.push(client, 0, slot=slot, examples=slot, local_steps=3, loss=0.5, norm=slot / 2)
        assert (decision.status, decision.completes, decision.staleness, decision.step) == (0, 0, 0, 1)
    decision = control.push("b", 0, slot=20, norm=7.0, examples=4)
    assert (decision.status, decision.freed, decision.join, decision.step) == (1, 10, 3, 1)
    with check_raised("1 [afflux.h] the version of a push was never made"):
        control.push(9, 1)
    decision = control.push(9, -1 - 0, examples=0)
    assert (decision.status, decision.join, decision.step, decision.freed, decision.staleness) == (5, -1, -1, -1, 0)
    assert control.push(-1, 0, slot=13).completes == 1
    with check_raised("1 [control] the buffer is a round, which must be decided first"):
        control.push(9, 0)
    assert control.arrivals("slots") == [13, 12, 11, 20]
    assert control.arrivals("examples") == [1, 12, 11, 4]
    assert control.arrivals("norms") == [0.0, 6.0, 5.5, 7.0]
    assert (control.arrivals("joins"), control.arrivals("local_steps")) == ([4, 2, 1, 3], [0, 3, 3, 0])
    assert (control.arrivals("losses"), control.arrivals("versions")) == ([0.0, 0.5, 0.5, 0.0], [0] * 4)
    control.call("decide_round", 1)
    assert (control.version, control.push(5, 0).staleness, control.arrivals("stalenesses")) == (0, 1, [1])
    control.call("commit")
    control.call("decide_round", 1)
    control.call("commit")
    decision = control.push(5, 0)
    assert (decision.status, decision.staleness, decision.version, decision.step) == (4, 2, 2, -1)
    assert control.push(5, -1 - 1).staleness == 1
    assert control.counts() == ([6, 1, 0, 0, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0, 0, 0])
    assert (control.number("discard"), control.number("discard")) == (1, 0)
    for name in ("commit", "decide_round"):
        with check_raised("1 [control] "):
            control.call(name, 1)


def test_participations_in_c():
    control = Control(buffer_size=1, duplicates=2, participations=1)
    assert control.push(1, 0).completes == 1
    control.call("decide_round", 0)  # the rule skips it
    assert [control.push(client, 0).status for client in (1, 2)] == [3, 0]


def test_passes_and_wrong_settings_of_control_in_c():
    control = Control(buffer_size=2, by_flush=1, pass_clients=2)
    assert [control.push(client, 0).status for client in (1, 1, 2)] == [0, 3, 0]
    with check_raised("1 [afflux.h] pass_clients other clients have entered in this pass"):
        control.push(3, 0)
    assert (control.number("end_pass", 0, kind=ctypes.c_int), control.version) == (1, 0)
    assert (control.number("end_pass", 1, kind=ctypes.c_int), control.push(3, 0).status) == (0, 0)
    for settings, message in [
        ({}, "[control] buffer_size must be at least 1"),
        ({"buffer_size": 1, "duplicates": 3}, "[afflux.h] duplicates is 3, must be from 0 to 2"),
        ({"buffer_size": 1, "pass_clients": -1}, "[control] the clients of a pass must be at least 1"),
        (
            {"buffer_size": 1, "duplicates": 1, "participations": -1},
            "[control] participations must be from 1 to 2^31 - 1",
        ),
        (
            {"buffer_size": 1, "participations": 1},
            "[control] participations are of rules without passes, with a client",
        ),
        ({"buffer_size": 1, "limits_staleness": 1, "max_staleness": -1}, "[control] max_staleness must be at least 0"),
    ]:
        with check_raised(f"1 {message}"):
            Control(**settings)


def check_raised(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


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
