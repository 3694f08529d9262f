"""Ways to run the operations: instruction sets of the CPU, how they use memory, CUDA, and numbers of threads."""

import os
from dataclasses import dataclass

from afflux import _engine
from afflux.ops.errors import AffluxError, UnavailableError
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
    if type(num_threads) is int and 0 < num_threads < 2**31:
        return num_threads
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


def policy() -> str:
    """How sweeps on the CPU use memory in this process: "prefetch=256,stream=16777216,stages=fused,rows=direct".

    The default is that of the processor's family; see `choose_policy`.

    Raises:
        AffluxError: the environment's AFFLUX_POLICY is no policy.
    """
    return _engine.policy()


def choose_policy(text: str) -> None:
    """Use this policy in all later calls of this process (the environment's AFFLUX_POLICY does so at the start).

    It changes no bit of a result, only the speed.

    Args:
        text: settings separated by commas; those that are left out keep the processor's default::

            prefetch=BYTES: `ingest` and `apply` prefetch vectors so many bytes ahead, 0 (by the processor alone) to
                65536; rounds that compute more than they read keep a distance of their own.
            stream=BYTES, stream=never: `ingest`, and rounds without rows in registers, write past the caches
                (non-temporal stores) in sweeps over at least so many bytes; a server's `ingest` counts the vectors of
                the whole round.
            stages=fused, stages=tiled: rounds of float32 params, float32 or bfloat16 updates and plain rows or none in
                registers, with one rule vector at most, and `inner` of up to 16 such vectors; or all of them tile by
                tile.
            rows=direct, rows=copied: affine rows are encoded from updates where they lie, or from copies in L1.

    Raises:
        AffluxError: something else is in the text, or a setting twice.

    >>> before = policy()
    >>> choose_policy("prefetch=512,stages=tiled")
    >>> policy().startswith("prefetch=512,"), ",stages=tiled," in policy()
    (True, True)
    >>> choose_policy(before)
    """
    given = as_text(text)
    if given is None or not given.isascii():
        raise AffluxError(f"[choose_policy] text is {brief(text)}, must be a str such as {policy()!r}")
    _engine.choose_policy(given)


def processor_family() -> str:
    """The family of processors that the default policy is of: "AMD family 26"."""
    return _engine.processor_family()
