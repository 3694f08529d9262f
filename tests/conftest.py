"""Fixtures shared by the suite: the instruction sets that run here, and vectors that provoke rounding."""

import gc
import os
import re
import shutil
import traceback

os.environ.setdefault("AFFLUX_THREAD_BYTES", "1")  # vectors here are short; all threads that are asked for shall start

from pathlib import Path

import numpy as np
import pytest

import pairwise
import parts
import processes
from afflux import AffluxError, ops
from afflux.ops.errors import ConfigError
from afflux.rules import RULES

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: The pages of docs but the results and the API reference.
DOCS = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name not in ("api", "results"))
#: Importing them, as the search for doctests does, puts another engine in place, or looks for one.
collect_ignore_glob = ["*emulated.py", "*fake_cupy.py", "*fake_torch.py", "*gpu_servers.py", "*sharded_servers.py"]
collect_ignore_glob += ["*ray_servers.py"]
#: Packages that a test may import without asking whether they are installed.
OPTIONAL = "torch|jax|ml_dtypes|scipy|equinox|haiku|tensorboard|rich|typer|appfl|flwr|nvflare|yaml"
ISAS = [b.name for b in ops.backends() if b.device == "cpu" and b.runs]
THREADS = [1, 2, 3]


def pytest_configure(config):
    gc.disable()  # until all tests are collected
    pairwise.soaking = "soak" in config.option.markexpr.replace("not soak", "")
    config.pluginmanager.register(parts.Parts())
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(parts.Running(config))


def pytest_collection_finish():
    """What has been imported and collected stays: no garbage collection has to visit it from here on."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A file that imports an optional package, itself or by what it tests, is skipped where the package is missing."""
    report = yield
    if report.failed and (lack := re.search(rf"ModuleNotFoundError: .*\b({OPTIONAL})\b", str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {lack[1]} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that imports an optional package itself, or by a helper beside it, is skipped where it is missing."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if re.match(rf"({OPTIONAL})\b", error.name or "") and TESTS in Path(frame.f_code.co_filename).parents:
            pytest.skip(f"{error.name} is not installed")
        raise


@pytest.fixture(scope="session", autouse=True)
def processes_end():
    """The session fails if a process that a test has started still runs when all tests have ended."""
    processes.adopt_orphans()
    yield
    left = processes.remaining()
    assert not left, f"tests have left processes behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def default_interrupts():
    with processes.default_interrupts():
        yield


@pytest.fixture
def policy_after():
    """Puts back the policy that the test chooses another in place of."""
    before = ops.policy()
    yield
    ops.choose_policy(before)


@pytest.fixture
def isa_after():
    """Puts back the instruction set that the test chooses others in place of."""
    before = next(b.name for b in ops.backends() if b.chosen)
    yield
    ops.choose_isa(before)


@pytest.fixture(params=ISAS)
def isa(request, isa_after):
    """Runs the test once per instruction set, and puts the choice back."""
    ops.choose_isa(request.param)
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(20240)


@pytest.fixture(params=["mapped", "written"])
def mapped(request, monkeypatch):
    """Both ways of a store to reach the disk; on a file system that promises nothing, the second one alone."""
    if request.param == "written":
        monkeypatch.setattr("afflux.store.stored_vectors.promises_space", lambda folder: False)


@pytest.fixture(scope="session")
def nine_rows(tmp_path_factory):
    """A store that tests only read, or copy; see nine_rows.py."""
    from nine_rows import make

    return make(tmp_path_factory.mktemp("tools") / "store")


@pytest.fixture
def ray(monkeypatch):
    """In place of Ray, with actors that are objects of this process."""
    from fake_ray import FakeRay

    fake = FakeRay()
    monkeypatch.setattr("afflux.distributed.connection.import_ray", lambda: fake)
    yield fake
    fake.shutdown()


@pytest.fixture
def path(nine_rows, tmp_path):
    """A copy of that store."""
    return shutil.copytree(nine_rows, tmp_path / "store")


def generator(seed=0):
    """NumPy's generator, as the simulator makes them."""
    return np.random.Generator(np.random.PCG64(seed))


def found(name):
    """The one file of that name, in whatever folder under tests/."""
    (path,) = TESTS.rglob(name)
    return path


def awkward(rng, size):
    """Float32 of both signs and of 60 binary orders of magnitude, zeros of both signs and subnormals included."""
    values = rng.standard_normal(size) * 2.0 ** rng.integers(-30, 30, size)
    values[rng.random(size) < 0.02] = 0.0
    values[rng.random(size) < 0.02] = -0.0
    values[rng.random(size) < 0.02] = 1e-41
    return values.astype(np.float32)


def preset(name, **options):
    """The preset; AFLGuard's accepts every arrival."""
    return RULES[name](**({"most": 1e150} if name == "aflguard" else {}), **options)


def ready(server, vector=None):
    """Sets the vectors that the rule needs, by default a gradient so short that Zeno++ accepts every arrival."""
    for name in server.rule.needs.handed_in:
        size = server.pull().params.size
        server.set_rule_vector(name, np.full(size, 0.25 / max(size, 1) ** 0.5) if vector is None else vector)
    return server


def push_all(server, clients, vector, **facts):
    """Push a vector of the rule's kind for one client after the other; return the last receipt.

    The vector, or a fact, may be a function of the client. Without `version=` each is trained from the newest one.
    """
    receipt = None
    for client in clients:
        own = {name: fact(client) if callable(fact) else fact for name, fact in facts.items()}
        values = vector(client) if callable(vector) else vector
        receipt = server.push(client=client, **{server.rule.kind: values, "version": server.version, **own})
    return receipt


def raising(error, *details):
    """A function that raises a new error of this class, whatever its own arguments."""

    def fail(*_, **__):
        raise error(*details)

    return fail


def check_error(text, call, /, *arguments, error=AffluxError, **options):
    """Check that the call raises the error, with a message in which the pattern `text` is found; return the error."""
    with pytest.raises(error, match=text) as caught:
        call(*arguments, **options)
    try:
        return caught.value
    finally:
        del caught  # which refers to the error, whose traceback refers to this frame


def check_refused(text, call, /, *arguments, **options):
    """Check that the call raises ConfigError, with a message in which the pattern `text` is found; return the error."""
    return check_error(text, call, *arguments, error=ConfigError, **options)


def check_raises(error, call, /, *arguments, **options):
    """Check that the call raises the error, whatever its message; return the error."""
    return check_error(None, call, *arguments, error=error, **options)


def bits(array):
    """The array's bytes: equality of bits, not of values."""
    return np.ascontiguousarray(array).tobytes()


def same_state(state, other):
    """Check that two states of servers have the same facts, and the same bits in all their arrays."""
    assert state["meta"] == other["meta"]
    assert state["arrays"].keys() == other["arrays"].keys()
    for name, array in state["arrays"].items():
        assert bits(array) == bits(other["arrays"][name]), name


def read_only(array):
    """The array itself, which can no longer be written."""
    array.flags.writeable = False
    return array


def reproducible(result):
    """All of a simulation's result but the seconds."""
    facts = (result.spec, result.seed, result.evaluations, result.decisions, result.totals, result.state_bytes)
    arrays = (result.staleness.tolist(), result.round_staleness.tolist(), result.clients.tolist())
    return (*facts, result.num_clients, *arrays, result.params.tobytes())


#: JAX warns of every fork once another test file of this process has used it; the children here use none of it.
FORKS = "ignore:os.fork\\(\\) was called:RuntimeWarning"
#: The marks of tests that fork.
FORKING = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings(FORKS),
]


def needs_fork(test):
    """Give a test the marks of those that fork."""
    for mark in FORKING:
        test = mark(test)
    return test


class Dlpack:
    """A vector that only the engine can read: it has no slices."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class FakeCuda:
    """The attributes of a GPU tensor that are read before its memory."""

    shape = (5,)

    def __dlpack_device__(self):
        return 2, 1

    def __dlpack__(self, **_):
        raise AssertionError("must not be asked")
