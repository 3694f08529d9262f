"""What a server is asked to be, against what its rule needs."""

import sys
from typing import Literal

import numpy as np

from afflux import ops
from afflux.aggregation.admission import Duplicates
from afflux.aggregation.streaming import MemoryMode
from afflux.arrays.devices import HOST, Device
from afflux.ops import codecs
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import integer, one_of, optional
from afflux.rules.rule import Rule

RowsOn = Literal["device", "host"]


def refuse_places(rule: Rule, rows_on: RowsOn, device: Device, *, store: bool, check_versions: bool) -> None:
    """Refuses what is not to be had where the params are."""
    one_of("device", "host")("Server", "rows_on", rows_on)
    if check_versions and device is not HOST:
        raise UnavailableError(f"[Server] check_versions: params is on {device.name}, and this is for the CPU alone")
    if rows_on == "host":
        why = None
        if device is HOST:
            why = "params is on the CPU, and so are the rows"
        elif store:
            why = "the rows are in the store"
        elif not rule.calibrate.cached:
            why = f"{rule.name} caches no rows"
        if why is not None:
            raise AffluxError(f"[Server] rows_on is 'host', but {why}")


def refuse_starts(rule: Rule, dtype: str) -> None:
    """Refuses a rule whose vectors begin at what they cannot hold."""
    for name, first in rule.memories.items():
        if not first < float(np.finfo(dtype).max):
            raise AffluxError(f"[Server] {rule.name} starts its {name} at {first}, which {dtype} cannot hold")


def refuse_commits(op: str, durability: str | None, commit_every: int | None) -> None:
    """Refuses what a store does not know; `durability` None: its default."""
    one_of("process", "power")(op, "durability", "process" if durability is None else durability)
    optional(integer(1))(op, "commit_every", commit_every)


def slots_of(rule: Rule, max_slots: int | None, memory: MemoryMode) -> int:
    """How many copies of pushed vectors may exist at once."""
    if rule.needs.passes:
        if max_slots is not None:
            raise AffluxError(f"[Server] max_slots: arrivals of {rule.name} that wait for the next pass need slots too")
        return sys.maxsize
    return max_slots or ops.default_threads() + (1 if memory == "streaming" else 2 * rule.buffer_size)


def codec_of(rule: Rule, slot_dtype: str) -> Codec | None:
    """Of the rows, for rules that cache some; by default they hold every bit."""
    if not rule.calibrate.cached:
        return None
    exact = codecs.float64 if slot_dtype == "float64" else codecs.float32  # also of bfloat16
    codec = rule.calibrate.codec or exact
    if codec.exact and codec != exact:
        raise AffluxError(
            f"[Server] {rule.name} keeps rows as {codec.name}, but those of {slot_dtype} slots need {exact}"
        )
    return codec


def clients_of(rule: Rule, num_clients: int | None, duplicates: Duplicates) -> int:
    """N, for rules that need it."""
    if num_clients is None:
        why = "caches a row per client" if rule.calibrate.cached else "takes every client once per pass"
        raise AffluxError(f"[Server] {rule.name} {why}: give num_clients")
    if not rule.needs.passes and rule.buffer_size > num_clients and duplicates != "both":
        raise AffluxError(
            f"[Server] buffer_size {rule.buffer_size} exceeds num_clients {num_clients}: with duplicates="
            f"{duplicates!r} a buffer takes each client once, and would never fill"
        )
    return num_clients


def why_not(rule: Rule, *, inplace: bool, streaming: bool) -> str | None:
    """Why a server copies whatever is pushed; None if it may read it in place.

    A round that has read a value which is not finite is made again without that vector, so it must not overwrite
    anything but memory of its own.
    """
    if streaming:
        return "memory='streaming' adds it up at once"
    if inplace:
        return "inplace=True overwrites params"
    if rule.needs.gram:
        return f"{rule.name} takes inner products first"
    if rule.calibrate.cached:
        return f"{rule.name} overwrites cached rows"
    if rule.memories:
        return f"{rule.name} overwrites its {', '.join(rule.memories)}"
    return None
