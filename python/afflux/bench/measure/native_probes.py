"""The native probes, `native_probes.cpp`: compiled at the first use with the compiler found, and kept for the next."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.bench.measure import machine

SOURCE = Path(__file__).with_name("native_probes.cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"]
#: As native_probes.cpp has them.
MOST_TILE, MOST_GROUP = 4096, 16

#: words of memory, and the bytes an element of the vector that lies there
Placed = tuple[npt.NDArray[np.float32], float]


class MissingCompiler(Exception):
    """There are no native probes here; the message says why."""


@dataclass(frozen=True)
class Variant:
    """One way to move the same streams."""

    ahead: int = 0  #: bytes prefetched ahead of every stream
    tile: int = 1024  #: elements of a stream before the next has its turn
    group: int = MOST_GROUP  #: streams that are read side by side, at most
    past_cache: bool = False  #: non-temporal stores to what is written elsewhere

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
    memory: Any  # kept alive as long as this


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, c++, g++ or clang++."""
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
    """Where compiled probes are kept; a fresh temporary folder if that cannot be written."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "afflux"
    with suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
    return kept if os.access(kept, os.W_OK) else Path(tempfile.mkdtemp(prefix="afflux-"))


@functools.cache
def library() -> ctypes.CDLL:
    """The probes for this source, compiler and CPU. Raises MissingCompiler."""
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
    return loaded


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
    """A call that makes this sweep `laps` times: sum = all reads, writes = sum, in_place += sum.

    It returns the sum of all words read, if there is nothing to write.
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
