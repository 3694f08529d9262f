"""Instruction sets of the CPU, CUDA, the policy for memory accesses, and numbers of threads."""

import os
from dataclasses import dataclass, replace
from functools import cache

from afflux import _engine
from afflux._engine_library import CUDA_STATE
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import a_thread_count, as_text, brief


@dataclass(frozen=True, slots=True)
class Backend:
    """An instruction set of the CPU, or CUDA."""

    name: str  #: "avx512", "avx2", "baseline", "neon" or "cuda"
    device: str  #: "cpu" or "cuda"
    compiled: bool
    runs: bool
    chosen: bool
    why_not: str  #: the reason why it cannot be used; empty if it can


def default_threads() -> int:
    """Return the number of CPUs that this process may use, by its affinity and its container's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, _cpu_quota() or cpus)


#: The CPUs that the quotas of this process's control groups allow, rounded up; 0 without a quota.
_cpu_quota = cache(_engine.cpu_quota)


def threads(num_threads: int | None, op: str = "threads") -> int:
    """Return `num_threads` as Python's int, or the number of all CPUs for None; messages name the operation `op`."""
    if type(num_threads) is int and 0 < num_threads < 2**31:
        return num_threads
    return default_threads() if num_threads is None else a_thread_count(op, "num_threads", num_threads)


def backends() -> list[Backend]:
    """Return the backends, best first: whether each is compiled, runs on this machine, and is in use."""
    entries = [Backend(*entry) for entry in _engine.backends()]
    if CUDA_STATE:  # the library without CUDA does not know that afflux-cuda13 is installed
        entries = [e if e.device != "cuda" or e.compiled else replace(e, why_not=CUDA_STATE) for e in entries]
    return entries


def choose_isa(name: str) -> None:
    """Set the instruction set of all later calls of this process. The environment variable AFFLUX_ISA sets the first
    one.

    Raises:
        UnavailableError: the name is unknown, or this CPU cannot run it.
    """
    text = as_text(name)
    if text is None or not text.isascii():
        names = ", ".join(backend.name for backend in backends() if backend.device == "cpu")
        raise UnavailableError(f"choose_isa asks for {brief(name)}, which is unknown here; known: {names}")
    _engine.choose_isa(text)


def policy() -> str:
    """Return the policy of sweeps on the CPU in this process.

    An example is "prefetch=256,stream=16777216,stages=fused,rows=direct". The default depends on the processor's
    family; see `choose_policy`.

    Raises:
        AffluxError: the environment variable AFFLUX_POLICY is not a policy.
    """
    return _engine.policy()


def choose_policy(text: str) -> None:
    """Set the policy of all later calls of this process. The environment variable AFFLUX_POLICY sets the first one.

    A policy changes no bit of a result, only the speed.

    Args:
        text: settings separated by commas; missing settings have the processor's default::

            prefetch=BYTES: `ingest` and `apply` prefetch vectors this many bytes ahead, from 0 (only the processor
                prefetches) to 65536. Rounds that are bound by computation have their own distance.
            stream=BYTES, stream=never: sweeps over at least this many bytes write past the caches (non-temporal
                stores). This applies to `ingest`, and to rounds without rows that run in registers. A server's `ingest`
                counts the bytes of all vectors of the round.
            stages=fused, stages=tiled: with fused, these run in registers: rounds of float32 params with float32 or
                bfloat16 updates, plain rows or none, and at most one rule vector; and `inner` of up to 16 such vectors.
                All others, and with tiled all, run tile by tile.
            rows=direct, rows=copied: affine rows are encoded from the updates in place, or from copies in L1.

    Raises:
        AffluxError: the text has an unknown setting or value, or a setting twice.

    >>> before = policy()
    >>> choose_policy("prefetch=512,stages=tiled")
    >>> policy().startswith("prefetch=512,"), ",stages=tiled," in policy()
    (True, True)
    >>> choose_policy(before)
    """
    setting = as_text(text)
    if setting is None or not setting.isascii():
        raise AffluxError(f"[choose_policy] text is {brief(text)}, must be a str such as {policy()!r}")
    _engine.choose_policy(setting)


def processor_family() -> str:
    """Return the processor family whose default policy is used, as "AMD family 26"."""
    return _engine.processor_family()
