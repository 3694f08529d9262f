"""Ways to run the operations: instruction sets of the CPU, CUDA, and numbers of threads."""

import os
from dataclasses import dataclass

from afflux import _engine
from afflux.ops.errors import UnavailableError
from afflux.ops.validation import a_thread_count, as_text, brief


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


def threads(num_threads: int | None, op: str = "threads") -> int:
    """`num_threads` as Python's int, or all CPUs for None; messages name the operation."""
    return default_threads() if num_threads is None else a_thread_count(op, "num_threads", num_threads)


def backends() -> list[Backend]:
    """What was compiled, what runs on this machine, and what is chosen; best first."""
    return [Backend(*entry) for entry in _engine.backends()]


def choose_isa(name: str) -> None:
    """Use this instruction set in all later calls of this process (the environment's AFFLUX_ISA does so at the start).

    Raises:
        UnavailableError: the name is unknown, or this CPU cannot run it.
    """
    text = as_text(name)
    if text is None or not text.isascii():
        known = ", ".join(backend.name for backend in backends() if backend.device == "cpu")
        raise UnavailableError(f"choose_isa asks for {brief(name)}, which is unknown here; known: {known}")
    _engine.choose_isa(text)
