"""Ways to run the operations: instruction sets of the CPU, CUDA, and numbers of threads."""

import os
from dataclasses import dataclass

from afflux import _engine
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_int, brief


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run the operations."""

    name: str  #: "avx512", "avx2", "baseline", "neon" or "cuda"
    device: str  #: "cpu" or "cuda"
    compiled: bool
    runs: bool
    chosen: bool
    why_not: str  #: empty if it runs


def default_threads() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(num_threads: int | None) -> int:
    """`num_threads` as Python's int, or all CPUs for None."""
    if num_threads is None:
        return default_threads()
    number = as_int(num_threads)
    if number is None:
        raise AffluxError(f"num_threads is {brief(num_threads)}, must be an int of at least 1")
    return number


def backends() -> list[Backend]:
    """What was compiled, what runs on this machine, and what is chosen; best first."""
    return [Backend(*entry) for entry in _engine.backends()]


def choose_isa(name: str) -> None:
    """Use this instruction set in all later calls of this process (the environment's AFFLUX_ISA does so at the start).

    Raises:
        UnavailableError: the name is unknown, or this CPU cannot run it.
    """
    _engine.choose_isa(name)
