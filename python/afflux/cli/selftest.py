"""`afflux selftest`: whether this installation computes the right bits, keeps a store, and is as fast as it can be."""

import argparse
import logging
import os
import platform
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from afflux import Server, __version__, _engine, ops, store
from afflux.cli.bench import Inputs, Operation, applied
from afflux.cli.common import Parser, add_command
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.rules import RULES
from afflux.selftest import digest, pushes
from afflux.sim.errors import errors_of_writing

HELP = """Test this installation in under a minute, and print a report, which can be attached to an issue.

The digests of all operations and rules on each instruction set; the choice of
the instruction set, against /proc/cpuinfo; a store; a server on a store, whose
process is killed three times amid 200 pushes; the speed next to a copy. The exit
code is 1 if a test fails. No other package is needed than those of the core.

Examples:
  afflux selftest
  afflux selftest --out report.txt
  afflux selftest --device cuda
"""
#: The flags of /proc/cpuinfo that an instruction set needs, best set first; ARM processors all have NEON.
FLAGS = {
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "avx2": {"avx2", "fma", "f16c"},
    "baseline": {"sse2"},
}
#: The numbers of joins after which the process is killed.
KILLS = (57, 113, 171)


class FailedError(Exception):
    """A test of this installation has failed."""


def expect(condition: bool, message: str) -> None:
    """Raise FailedError unless the condition holds."""
    if not condition:
        raise FailedError(message)


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the command."""
    parser = add_command(commands, selftest, HELP)
    parser.option("--device", default="cpu", help="cpu, or cuda: also all rules with params on the GPU.")
    parser.option("--out", type=Path, help="A file for the report as well.")


def selftest(arguments: Namespace) -> None:
    """Run all tests (see HELP)."""
    if arguments.device not in ("cpu", "cuda"):
        raise AffluxError(f"--device is {arguments.device!r}, must be cpu or cuda")
    put = on_gpu() if arguments.device == "cuda" else None
    if arguments.out is not None:  # before the tests, which take a while
        with errors_of_writing(arguments.out):
            arguments.out.open("a").close()
    lines = list[str]()

    def say(line: str) -> None:
        print(line)
        lines.append(line)

    for line in machine():
        say(line)
    failures = 0
    tests: dict[str, Callable[[], str]] = {"instruction set": chosen_instruction_set}
    for backend in ops.backends():
        if backend.device == "cpu" and backend.runs:
            tests[f"bits, {backend.name}"] = lambda name=backend.name: bits(name)  # type: ignore[misc]
    if put is not None:
        tests["bits, cuda"] = lambda: same({name: digest.rule(name, 1, put) for name in RULES})
    tests |= {"store": stored, "kills": killed, "speed": speed}
    for name, test in tests.items():
        start = time.perf_counter()
        try:
            result = test()
        except Exception as error:
            failures += 1
            result = f"FAILED: {error if isinstance(error, FailedError) else repr(error)}"
        say(f"{name:<16}{result}  [{time.perf_counter() - start:.1f} s]")
    say(f"{len(tests) - failures} tests passed, {failures} failed")
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")
    if failures:
        raise SystemExit(1)


def machine() -> Iterator[str]:
    """Yield the facts about the machine and the installation."""
    yield f"afflux          {__version__}, order_version {_engine.ORDER_VERSION}, {Path(_engine.__file__ or '').name}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "msgspec"))
    yield f"Python          {platform.python_version()}, {packages}"
    yield f"machine         {platform.platform()}"
    yield f"processor       {processor()}; {ops.default_threads()} threads by default"
    yield f"policy          {ops.policy()} ({ops.processor_family()})"
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("AFFLUX_")]
    yield f"environment     {' '.join(settings) or 'no AFFLUX_ variable is set'}"


def cpuinfo() -> str:
    """Return /proc/cpuinfo; empty where the system has none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def processor() -> str:
    """Return the name of the processor."""
    name = re.search(r"^model name\s*:\s*(.*)$", cpuinfo(), re.MULTILINE)
    return name[1] if name else platform.machine()


def chosen_instruction_set() -> str:
    """Compare the engine's choice with the processor's flags."""
    backends = [backend for backend in ops.backends() if backend.device == "cpu"]
    (chosen,) = (backend.name for backend in backends if backend.chosen)
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo(), re.MULTILINE)
    if flags is None or chosen == "neon":  # qemu-user shows the host's processor
        return f"{chosen} runs; this system has no flags of it in /proc/cpuinfo to compare with"
    best = next(name for name, needed in FLAGS.items() if needed <= set(flags[1].split()))
    if os.environ.get("AFFLUX_ISA"):
        return f"{chosen} runs, because AFFLUX_ISA asks for it; the processor has {best}"
    expect(chosen == best, f"{chosen} runs, but the processor has {best}")
    return f"{chosen} runs, the best that the processor has"


def bits(name: str) -> str:
    """Compare all digests on an instruction set with the golden ones."""
    (before,) = (backend.name for backend in ops.backends() if backend.chosen)
    logger = logging.getLogger("afflux")
    level = logger.level
    ops.choose_isa(name)
    logger.setLevel(logging.ERROR)  # rounds of gsgm wait long, of which a server warns
    try:
        return same(digest.parts(2))
    finally:
        logger.setLevel(level)
        ops.choose_isa(before)


def same(digests: dict[str, str]) -> str:
    """Compare digests with the golden ones."""
    golden = digest.golden()
    others = [name for name, value in digests.items() if name in golden and golden[name] != value]
    expect(not others, f"other bits than the golden ones: {', '.join(others)}")
    count = sum(name in digests for name in golden)
    expect(count > 0, "golden.json has none of these digests")
    return f"{count} of {len(golden)} golden digests computed, all equal"


def on_gpu() -> Callable[[np.ndarray], object]:
    """Return the function that copies an array to the GPU."""
    missing = next(backend.why_not for backend in ops.backends() if backend.device == "cuda")
    if missing:
        raise UnavailableError(f"--device cuda: {missing}")
    try:
        import torch
    except ModuleNotFoundError:
        raise UnavailableError("--device cuda needs torch, for arrays on the GPU: pip install torch") from None
    return lambda array: torch.from_numpy(array.copy()).cuda()


def stored() -> str:
    """Compare a server on a store, closed and opened again, with one in memory."""
    with TemporaryDirectory(prefix="afflux-selftest-") as folder:
        path, reference = Path(folder) / "store", pushes.make()
        server = pushes.make(path)
        for number in range(30):
            if number == 20:
                server.close()
                server = Server.open(path, num_threads=1)
            pushes.push(server)
            pushes.push(reference)
        expect(pushes.state_digest(server) == pushes.state_digest(reference), "other bits than in memory")
        server.close()
        health = store.check(path)
        expect(health.sound, f"the store is damaged: {'; '.join(health.problems)}")
        size = sum(store.info(path).disk_bytes.values())
    return f"30 pushes, closed and opened once: the bits of a server in memory; {size / 1e6:.1f} MB, sound"


def killed() -> str:
    """Kill the process of a server on a store amid its pushes; compare the result with a server that was not killed."""
    with TemporaryDirectory(prefix="afflux-selftest-") as folder:
        path = Path(folder) / "store"
        for least in KILLS:
            command = [sys.executable, "-m", "afflux.selftest.pushes", str(path)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                reached = any(int(line) >= least for line in process.stdout)
                process.kill()
                expect(reached, f"the process ended before {least} pushes: {process.stderr.read().strip()[-300:]}")
        reference = pushes.make()
        while reference.joins < pushes.PUSHES:
            pushes.push(reference)
        with pushes.open_or_make(path) as server:
            while server.joins < pushes.PUSHES:
                pushes.push(server)
            expect(pushes.state_digest(server) == pushes.state_digest(reference), "other bits than without kills")
        expect(store.check(path).sound, "the store is damaged")
    return f"{pushes.PUSHES} pushes, killed {len(KILLS)} times: the bits of a server that was not killed"


def speed() -> str:
    """Return the speed of operations beside a copy."""
    inputs = Inputs(2_000_000, 4, ops.default_threads())
    copy = inputs.copy_speed(7)
    slot = np.zeros(inputs.d, np.float32)

    def ingest() -> None:
        ops.ingest(inputs.updates[0], slot, num_threads=inputs.num_threads)

    step = applied(inputs, step=ops.Step("sgd", 0.7))
    shares = []
    for operation in (
        Operation("ingest", "", 8 * inputs.d, {"afflux": ingest}),
        Operation("apply", "", 4 * inputs.d * (inputs.m + 2), {"afflux": step}),
    ):
        operation.measure(7)
        shares.append(f"{operation.name} {operation.bytes / min(operation.seconds['afflux']) / 1e9:.1f} GB/s")
    return f"{', '.join(shares)}; a copy {copy / 1e9:.1f} GB/s"
