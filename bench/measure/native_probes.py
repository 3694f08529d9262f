"""The native probes, `native_probes.cpp`. They are compiled at the first use; the library is kept for later runs."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.measure import machine

SOURCE = Path(__file__).with_name("native_probes.cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"]
#: The same values as in native_probes.cpp.
MOST_TILE, MOST_GROUP = 4096, 16

#: words of memory, and the bytes per element of the vector in it
Placed = tuple[npt.NDArray[np.float32], float]


class MissingCompiler(Exception):
    """Raised if native probes cannot be compiled here; the message has the reason."""


@dataclass(frozen=True)
class Variant:
    """One way to move the same streams."""

    ahead: int = 0  #: bytes prefetched ahead of every stream
    tile: int = 1024  #: elements of a stream before the loop changes to the next stream
    group: int = MOST_GROUP  #: the most streams that are read side by side
    past_cache: bool = False  #: whether vectors that are not in place are written by non-temporal stores

    def __str__(self) -> str:
        stores = ", non-temporal stores" if self.past_cache else ""
        fetched = f"prefetch {self.ahead} B" if self.ahead else "no prefetch"
        return f"{fetched}, tile {self.tile}, {self.group} side by side{stores}"


class _Stream(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes_of_64", ctypes.c_int64)]


class _Sweep(ctypes.Structure):
    _fields_ = [(name, ctypes.POINTER(_Stream)) for name in ("reads", "writes", "in_place")] + [
        (name, ctypes.c_int64)
        for name in (
            *("num_reads", "num_writes", "num_in_place"),
            *("elements", "threads", "laps"),
            *("group", "tile", "ahead", "past_cache"),
        )
    ]
    memory: Any  # not freed before this object


def compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX, c++, g++ or clang++."""
    if given := shlex.split(os.environ.get("CXX", "")):
        return given
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise MissingCompiler("no C++ compiler was found")


def output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCompiler(f"{command[0]} does not run: {type(error).__name__}") from None
    if done.returncode != 0:
        raise MissingCompiler(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
    return done.stdout


def folder() -> Path:
    """Return the folder of compiled probes; a new temporary folder if this one cannot be written."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "afflux"
    with suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
    return kept if os.access(kept, os.W_OK) else Path(tempfile.mkdtemp(prefix="afflux-"))


@functools.cache
def library() -> ctypes.CDLL:
    """Load the probes for this source, compiler and CPU; raise MissingCompiler if they cannot be compiled."""
    command = [*compiler(), *FLAGS]
    made_of = (SOURCE.read_text(), command, output([*compiler(), "--version"]), machine.cpu_model())
    path = folder() / f"probes-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        output([*command, str(SOURCE), "-o", str(unfinished)])
        unfinished.replace(path)
    loaded = ctypes.CDLL(str(path))
    loaded.afflux_probe.argtypes = [ctypes.POINTER(_Sweep)]
    loaded.afflux_probe.restype = ctypes.c_double
    loaded.afflux_additions.argtypes = [ctypes.c_int64]
    loaded.afflux_additions.restype = ctypes.c_double
    loaded.afflux_accumulate.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2]
    loaded.afflux_accumulate.restype = None
    return loaded


@functools.cache
def why_missing() -> str:
    """Return the reason why there are no native probes on this machine; empty if there are."""
    try:
        library()
    except MissingCompiler as missing:
        return str(missing)
    return ""


def sweep(
    reads: Sequence[Placed],
    writes: Sequence[Placed],
    in_place: Sequence[Placed],
    elements: int,
    variant: Variant,
    *,
    threads: int,
    laps: int = 1,
) -> Callable[[], float]:
    """Return a function that makes this sweep `laps` times: sum = all reads, writes = sum, in_place += sum.

    If nothing is written, the function returns the sum of all words that it read.
    """
    roles = [
        (_Stream * max(1, len(role)))(*(_Stream(a.ctypes.data, int(64 * b)) for a, b in role))
        for role in (reads, writes, in_place)
    ]
    counts = map(len, (reads, writes, in_place))
    of_variant = (variant.group, variant.tile, variant.ahead, variant.past_cache)
    described = _Sweep(*roles, *counts, elements, threads, laps, *of_variant)
    described.memory = reads, writes, in_place
    return functools.partial(library().afflux_probe, described)


# Shared cores: another program, also of another virtual machine, may run on a core's other hardware thread. Additions
# in registers then take up to twice as long, and so does other work whose limit is arithmetic; the speed of memory
# hardly changes.

#: Rounds of twelve additions in one sample: about 50 us.
ROUNDS = 40_000
#: The results mention shared cores from this ratio of the median to the best time on.
SHARED = 1.15


@dataclass
class AdditionTimer:
    """A timer of additions, which run between the samples of a run if there are native probes."""

    seconds: list[float] = field(default_factory=list)

    def sample(self) -> None:
        if not why_missing():  # a note in the results reports the reason
            self.seconds.append(library().afflux_additions(ROUNDS))

    @property
    def slowdown(self) -> float | None:
        """The median time divided by the best; None without a sample."""
        return median(self.seconds) / min(self.seconds) if self.seconds else None
