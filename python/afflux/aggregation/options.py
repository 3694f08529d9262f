"""The options of a server: one frozen, checked object, which `Server`, `plan` and the store share.

`ServerOptions` checks each option by itself and against the others. `for_rule` checks them against a rule, and sets the
options that depend on it. Both raise before any memory is allocated.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal, Self, TypedDict

import numpy as np

from afflux import ops
from afflux.aggregation.limits import MAX_ABS, MOST_MAX_ABS, Limits
from afflux.arrays.interop import rounded_to
from afflux.ops import codecs
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.validation import (
    Check,
    Dtype,
    at_most,
    check_fields,
    count_of,
    flag,
    instance,
    integer,
    keyword_arguments,
    one_dtype_of,
    one_of,
    optional,
    positive,
)
from afflux.rules.rule import OnArrival, Rule, names_of_facts

Duplicates = Literal["latest", "both", "reject"]
Faults = Literal["raise", "record"]
Rounds = Literal["full", "flush"]
RowsOn = Literal["device", "host"]
Durability = Literal["process", "power"]
SlotType = Literal["float32", "float64", "bfloat16"]

#: The options for commits, which a store keeps apart from the others. `Server.open` may replace them.
COMMITS = ("durability", "commit_every")
#: The other options that `Server.open` may replace. The rest is part of the stored state.
REPLACEABLE = (
    "max_staleness",
    "faults",
    "max_slots",
    "max_versions",
    "flush_after",
    "max_abs",
    "max_norm",
    "clip_norms",
)
#: The options that a store keeps, but for those of commits. The others are in its facts.
STORED_OPTIONS = (*REPLACEABLE, "duplicates", "log", "accumulate", "seed", "facts", "rounds")


class Options(TypedDict, total=False):
    """The fields of `ServerOptions` as keyword arguments."""

    num_clients: int | None
    dtype: Dtype
    slot_dtype: Dtype | None
    duplicates: Duplicates | None
    max_staleness: int | None
    faults: Faults
    max_slots: int | None
    max_versions: int | None
    inplace: bool
    log: bool
    accumulate: bool
    flush_after: float | None
    max_abs: float | None
    max_norm: float | None
    clip_norms: float | None
    durability: Durability | None
    commit_every: int | None
    seed: int
    memory_budget: int | None
    rows_on: RowsOn
    facts: tuple[str, ...]
    rounds: Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a `Server`.

    Args:
        num_clients: N, the number of clients; needed by rules that cache rows, and by those that take every client once
            per pass. Other rules keep nothing for each client and do not count them: N only limits their buffer.
        dtype: the type of params, "float32" or "float64"; sums are float64 in both cases. This and `slot_dtype` may
            also be dtypes of NumPy, torch or ml_dtypes (np.float64, torch.float64); the fields hold the name.
        slot_dtype: the type of buffered arrivals: `dtype` (default), or "bfloat16", which halves the buffer and the
            bytes that a step reads, and rounds each arrival to 8 bits of precision.
        duplicates: the effect of a client's second arrival in one buffer. "both": both count (default of rules that
            cache no rows). "latest": the one from the newer version is kept instead of the first one, and the
            number of arrivals does not change (default of rules that cache rows, and of those that need each client
            once, which reject "both"). "reject": the first one is kept (their default with accumulate).
        max_staleness: arrivals older than this are dropped and counted; None keeps all.
        faults: how `push` handles invalid arguments from a client: a vector of the wrong length, dtype or shape or with
            a non-finite value, a version that was never made, and so on. "raise": an AffluxError. "record": a receipt
            with the status "faulty" and the reason; `Server.faults` lists the newest 1000, and `Server.counts` counts
            all. Errors in the calling program raise in both cases.
        max_slots: the largest number of copies of pushed vectors; at least M (1 if
            accumulating), by default 2 M + the number of CPUs (1 + the number of CPUs).
        max_versions: the largest number of versions of params that exist at once, held by clients or being written. A
            step that would need one more raises, and no arrival is lost. At least 2; None: no limit.
        inplace: a step overwrites params, for models too large for two copies. Pulls then copy, and wait for a step
            in progress. Not possible with a store.
        log: keep every decision in `Server.log`, for `afflux.replay`.
        accumulate: add arrivals to one float64 sum instead of buffering M vectors: at once, or, where several threads
            push, together with the next arrivals. For rules whose weights are known on arrival; `duplicates` must not
            be "latest".
        flush_after: seconds. When the first arrival in the buffer has waited longer, the next `poll` takes a step with
            the waiting arrivals, as `flush` does. No other call does, and the server has no thread of its own: call
            `poll` from time to time. `Server.open` starts the time again. None: a buffer waits until it is full.
        max_abs: a vector with an element of a larger magnitude, after the conversion, is rejected like one with a NaN,
            because one client could otherwise damage params and moments permanently. Default 1e15 if params are
            float32, 1e150 if they are float64; at most 1e30 or 1e300. If a rule's numbers could make vectors within the
            limit overflow within a million rounds, its first round raises an error; initial params beyond half of the
            largest finite number are rejected. A model's buffers have the same limit. The limit is rounded as elements
            are (to `slot_dtype`), if that makes it larger.
        max_norm: a vector whose Euclidean norm, after the conversion and the rounding to `slot_dtype`, is larger is
            rejected; None: no limit.
        clip_norms: k: the weight of a vector with a norm beyond k times the median is multiplied by k * median / norm,
            so that one update of a large norm cannot dominate a round, nor the second moments of an adaptive rule. The
            median is taken over the positive norms of the last 64 arrivals that entered rounds and of this buffer,
            clipped or not; of the buffer alone while there are fewer than 8. With fewer than 3 in the buffer, too, no
            weight is clipped. So norms may grow and shrink, and fewer than half of the arrivals cannot move the
            median. `Report.clips` has the factors. 10 clips only vectors that are exceptional. For updates and
            gradients, and rules that cache no rows; then `accumulate` is not possible.
            None (default): the rule is that of its paper. A rule with second moments then logs one warning, about the
            first vector with a norm beyond 100 medians.
        durability: what a commit to the store survives. "process": every kind of end of this process.
            "power": also a power failure of the machine. None (default): "process", or "power" where shards are on
            several nodes.
        commit_every: the multiples of this version number are committed to the store; None: only `checkpoint` and
            `close` commit.
        seed: the seed of the random bits that encode quantized rows: 0 to 2^64 - 1.
        memory_budget: bytes that the estimate of `afflux.plan` must not exceed. `max_slots` and `max_versions`, if
            they are not given, are chosen accordingly. The log is not counted; on a GPU the host's memory is not
            counted either.
        rows_on: the memory of cached rows, for a server on a GPU without a store: "device", or "host": pinned memory,
            from which the row of a client that pushes is copied to the GPU.
        facts: names of facts that clients may push, `push(facts={"tokens": 8192.0})`, in addition to those that the
            rule needs; at most 16 names in all, each of at most 64 characters. They are in `Arrivals.facts` and in the
            log, and adapters pass them from the metrics of replies. "num_examples" replaces the number of examples.
        rounds: what makes a round. "full": the arrival that fills the buffer, `flush` and `step`. "flush": only `flush`
            and `step`, with the arrivals that wait then, however many; for callers that know when a round ends. Then
            max_slots has no default, and without it the slots grow with the number of waiting arrivals; with it, a push
            raises BusyError if waiting arrivals have all of them.

    With `accumulate`, the direction v differs from the buffered one by at most 4 (M + 5) 2^-53 sum_i |w_i u_i| per
    element (for rules of kind `model` with |sum_i w_i params| in the sum), much less than the error of rounding params
    to float32. The rule's weights, its learning rate and the other values of a report are the same. The sum is made in
    the order of the joins: the bits are the same in a replay, for any number of threads and any instruction set, but
    not for permuted arrivals. A vector's norm must not exceed 1e150. Products with a raw weight that underflow are
    lost. An arrival costs one more sweep, over its slot and the sum; several waiting arrivals share one sweep.

    Raises:
        AffluxError: an option has a wrong type or value, or cannot be combined with another one.

    >>> ServerOptions(num_clients=10).max_staleness is None
    True
    >>> ServerOptions(max_versions=1)
    Traceback (most recent call last):
    afflux._engine.AffluxError: [Server] max_versions is 1, must be an int of at least 2
    """

    num_clients: int | None = None
    dtype: Dtype = "float32"
    slot_dtype: Dtype | None = None
    duplicates: Duplicates | None = None
    max_staleness: int | None = None
    faults: Faults = "raise"
    max_slots: int | None = None
    max_versions: int | None = None
    inplace: bool = False
    log: bool = False
    accumulate: bool = False
    flush_after: float | None = None
    max_abs: float | None = None
    max_norm: float | None = None
    clip_norms: float | None = None
    durability: Durability | None = None
    commit_every: int | None = 1
    seed: int = 0
    memory_budget: int | None = None
    rows_on: RowsOn = "device"
    facts: tuple[str, ...] = ()
    rounds: Rounds = "full"

    def __post_init__(self) -> None:
        check: dict[str, Check[Any]] = {
            "num_clients": optional(count_of(1)),
            "dtype": one_dtype_of("float32", "float64"),
            "duplicates": optional(one_of("latest", "both", "reject")),
            "max_staleness": optional(count_of(0)),
            "max_slots": optional(count_of(1)),
            "max_versions": optional(count_of(2)),
            "durability": optional(one_of("process", "power")),
            "commit_every": optional(count_of(1)),
            "seed": integer(0),
            "memory_budget": optional(integer(1, 2**63 - 1)),
            "flush_after": optional(positive),
            "max_norm": optional(positive),
            "clip_norms": optional(positive),
            "rows_on": one_of("device", "host"),
            "faults": one_of("raise", "record"),
            "facts": names_of_facts,
            "rounds": one_of("full", "flush"),
        } | dict.fromkeys(("inplace", "log", "accumulate"), flag)
        for name, checked in check.items():
            check_fields(self, checked, name, op="Server")
        check_fields(self, optional(one_dtype_of(self.dtype, "bfloat16")), "slot_dtype", op="Server")
        check_fields(self, optional(at_most(MOST_MAX_ABS[self.dtype])), "max_abs", op="Server")
        if self.rounds == "flush" and self.flush_after is not None:
            raise AffluxError("[Server] flush_after: with rounds='flush' only flush() and step() make rounds")
        if self.seed >= 2**64:
            raise AffluxError(f"[Server] seed is {self.seed}, must be less than 2**64")

    @property
    def limits(self) -> Limits:
        """The limits on pushed vectors. A value of max_abs is accepted, also if a slot rounds it up."""
        most = self.max_abs or MAX_ABS[self.dtype]
        rounded = rounded_to(self.slots_as, most)
        most = max(most, rounded) if rounded < inf else most
        return Limits(most, self.max_norm or inf, float(np.finfo(self.dtype).max), self.clip_norms)

    @property
    def slots_as(self) -> SlotType:
        """The dtype of slots: `slot_dtype`, or that of params."""
        name: SlotType = self.slot_dtype or self.dtype
        return name

    def for_rule(self, rule: Rule) -> Self:
        """Return these options for a rule, with the defaults that depend on the rule.

        Raises:
            AffluxError: an option cannot be combined with the rule.
        """
        _check_first_values(rule, self.dtype)
        codec_of(rule, self.slots_as)
        if self.max_slots is not None:
            optional(integer(1 if self.accumulate else rule.buffer_size))("Server", "max_slots", self.max_slots)
        self.slots_of(rule)
        if self.clip_norms is not None and (why := why_unclipped(rule, accumulate=self.accumulate)) is not None:
            raise AffluxError(f"[Server] clip_norms: {why}")
        names_of_facts("Server", "the facts of the rule and the option", self.fact_names(rule))
        duplicates = self.duplicates_for(rule)
        if rule.needs.once and duplicates == "both":
            raise AffluxError(
                f"[Server] duplicates='both': {rule.name} needs each client once in a buffer: use 'latest'"
            )
        if self.accumulate:
            known_on_arrival(rule)
            if duplicates == "latest":
                raise AffluxError(
                    "[Server] duplicates='latest' replaces arrivals, and accumulate=True cannot remove one from a "
                    "sum: use 'both' or 'reject'"
                )
        _check_clients(rule, self.num_clients, duplicates)
        return replace(self, duplicates=duplicates)

    def for_replacement(self, before: Rule, rule: Rule) -> Self:
        """Return these options for `rule`, which replaces the rule `before` for which they were made.

        Raises:
            AffluxError: an option cannot be combined with the rule, or the rule differs from the previous one in a
                property on which the server's state and pushes in progress depend; the message names it.
        """
        old, new = lasting_facts(before, self.slots_as), lasting_facts(rule, self.slots_as)
        for name, value in old.items():
            if new[name] != value:
                raise AffluxError(f"[Server] {name} is {value!r} of the rule in force, {new[name]!r} of the new one")
        return self.for_rule(rule)

    def replaced(self, rule: Rule, fields: Options) -> Self:
        """Return these options, which are those of a store, with other values of some fields.

        Raises:
            AffluxError: a field has a wrong type or value, or differs from the store's and cannot be replaced.
        """
        values: Options = {"slot_dtype": None, **fields}
        new = replace(self, **values)
        durability = new.durability or self.durability
        new = replace(new, slot_dtype=new.slots_as, duplicates=new.duplicates_for(rule), durability=durability)
        for name in fields:
            before, now = getattr(self, name), getattr(new, name)
            is_in_replay = name == "clip_norms" and self.log
            is_in_store = name != "num_clients" or before is not None
            if before != now and is_in_store and (is_in_replay or name not in (*REPLACEABLE, *COMMITS)):
                why = (
                    "a replay of its log clips all rounds alike"
                    if is_in_replay
                    else "only a new store can have another value"
                )
                raise AffluxError(f"[Server] {name} is {now!r}, and {before!r} in the store: {why}")
        return replace(self, **{name: getattr(new, name) for name in fields})

    def for_place(self, rule: Rule, gpu: str | None, *, store: bool) -> None:
        """Check the options against the device of the server's vectors: the GPU of that name, or the CPU.

        Raises:
            AffluxError: an option cannot be combined with the device, or needs or excludes a store.
        """
        if self.inplace and store:
            raise AffluxError("[Server] inplace: a store keeps the last version while the next one is written")
        if store and self.max_versions == 2 and self.commit_every != 1:
            raise AffluxError(
                f"[Server] max_versions is 2, must be at least 3: with commit_every={self.commit_every} a store holds "
                "the last commit's version, the newest one and the next"
            )
        if store and rule.needs.participations is not None and self.commit_every != 1:
            raise AffluxError(
                f"[Server] commit_every is {self.commit_every}, must be 1: {rule.name} counts the rounds of clients, "
                "and a crash would lose those after the last commit"
            )
        if not store and (self.durability is not None or self.commit_every != 1):
            option = "commit_every" if self.durability is None else "durability"
            raise AffluxError(f"[Server] {option}: without a store nothing is committed; give store=PATH")
        if self.rows_on == "host":
            why = None
            if gpu is None:
                why = "params is on the CPU, and so are the rows"
            elif store:
                why = "the rows are in the store"
            elif not rule.calibrate.cached:
                why = f"{rule.name} caches no rows"
            if why is not None:
                raise AffluxError(f"[Server] rows_on is 'host', but {why}")

    def fact_names(self, rule: Rule) -> tuple[str, ...]:
        """Return the names of the facts that pushes may have: those that the rule needs, then the others."""
        return tuple(dict.fromkeys((*rule.needs.facts, *self.facts)))

    def duplicates_for(self, rule: Rule) -> Duplicates:
        """Return the option, or its default for the rule."""
        once = rule.calibrate.cached or rule.needs.once
        return self.duplicates or ("both" if not once else "reject" if self.accumulate else "latest")

    def max_staleness_for(self, rule: Rule) -> int | None:
        """Return the option, or the limit that the rule needs, if that is smaller."""
        return min((most for most in (self.max_staleness, rule.needs.max_staleness) if most is not None), default=None)

    def stored(self) -> dict[str, dict[str, Any]]:
        """Return the facts "options" and "commits" of a store, as JSON-able data."""
        values = asdict(self)
        options = {name: values[name] for name in STORED_OPTIONS if name != "rounds" or self.rounds != "full"}
        return {"options": options, "commits": {name: values[name] for name in COMMITS}}

    def slots_of(self, rule: Rule) -> int:
        """Return the largest number of copies of pushed vectors."""
        if self.rounds == "flush" and self.max_slots is None and not self.accumulate:
            return sys.maxsize
        return self.max_slots or ops.default_threads() + (1 if self.accumulate else 2 * rule.buffer_size)


def options_of(op: str, options: object, fields: Options) -> ServerOptions:
    """Return `options`, or the default options, with these fields replaced."""
    base = optional(instance(ServerOptions, "a ServerOptions"))(op, "options", options)
    keyword_arguments(op, fields, Options.__annotations__)
    return replace(ServerOptions() if base is None else base, **fields)


def codec_of(rule: Rule, slot_dtype: str) -> Codec | None:
    """Return the codec of the cached rows, by default one that keeps every bit; None for rules that cache no rows."""
    if not rule.calibrate.cached:
        return None
    exact = codecs.float64 if slot_dtype == "float64" else codecs.float32  # also for bfloat16
    codec = rule.calibrate.codec or exact
    if codec.exact and codec != exact:
        raise AffluxError(
            f"[Server] {rule.name} keeps rows as {codec.name}, but those of {slot_dtype} slots need {exact}"
        )
    return codec


def _check_clients(rule: Rule, num_clients: int | None, duplicates: Duplicates) -> None:
    """Reject an N with which no buffer would fill, and a rule that needs N if there is none."""
    if num_clients is None:
        if rule.calibrate.cached or rule.needs.passes:
            why = "caches a row per client" if rule.calibrate.cached else "takes every client once per pass"
            raise AffluxError(f"[Server] {rule.name} {why}: give num_clients")
    elif not rule.needs.passes and rule.buffer_size > num_clients and duplicates != "both":
        raise AffluxError(
            f"[Server] buffer_size {rule.buffer_size} exceeds num_clients {num_clients}: with duplicates="
            f"{duplicates!r} a buffer takes each client once, and would never fill"
        )


def known_on_arrival(rule: Rule) -> OnArrival:
    """Return the rule's weigh part, if its weights are known on arrival except for a common factor.

    Raises:
        AffluxError: the weights are not known; the message has the reason.
    """
    weigh, needs = rule.weigh, rule.needs
    if rule.calibrate.cached:
        why = f"{rule.name} replaces the rows that it caches by the vectors of a full buffer"
    elif needs.products:
        why = f"{rule.name}'s come from the inner products of a full buffer"
    elif needs.rule_vectors:
        why = f"{rule.name} replaces its rule vectors ({', '.join(needs.rule_vectors)}) by the vectors of a full buffer"
    elif needs.trim:
        why = f"{rule.name} sorts the vectors of a full buffer"
    elif not isinstance(weigh, OnArrival):
        why = f"{rule.name}'s come from {weigh!r}, which has no on_arrival and factor"
    else:
        return weigh
    raise AffluxError(f"[Server] accumulate=True needs weights that are known on arrival; {why}")


def why_unclipped(rule: Rule, *, accumulate: bool) -> str | None:
    """Return the reason why a server cannot clip weights by norms; None if it can."""
    if rule.kind == "model":
        return f"{rule.name} takes models, whose norms do not measure a change; it clips updates and gradients"
    if rule.calibrate.cached:
        return f"{rule.name} caches rows, and a factor on the weight does not bound a row: use max_norm"
    if rule.needs.trim:
        return f"{rule.name} cuts large and small values by their shares of the weights: use max_norm"
    if rule.needs.noise:
        return f"{rule.name} adds noise, and factors that depend on the norms of others change what it hides"
    if accumulate:
        return "accumulate=True adds an arrival up before the median of its buffer is known"
    return None


def reads_in_place(rule: Rule, options: ServerOptions) -> bool:
    """Return whether the round of a step reads a vector only in its sweep, so that it need not be copied."""
    if options.accumulate or options.max_norm is not None or options.clip_norms is not None:
        return False
    needs = rule.needs
    return not (needs.norms or needs.products or rule.calibrate.cached)


#: The lasting facts that a saved state lacks if they have these values.
ABSENT: Mapping[str, object] = {"noise": False, "participations": None}


def lasting_facts(rule: Rule, slot_dtype: str) -> dict[str, object]:
    """Return the properties that a rule must share with the rule that it replaces.

    These are the properties that `Server.open` requires (the name, the kind and the vectors that the server keeps), and
    those that a push checks before its vector joins.
    """
    codec, needs = codec_of(rule, slot_dtype), rule.needs
    return {
        "name": rule.name,
        "kind": rule.kind,
        "rule_vectors": list(rule.rule_vectors),
        "codec": None if codec is None else codec.name,
        "scalars": sorted(needs.scalars),
        "handed_in": sorted(needs.handed_in),
        "passes": needs.passes,
        "norms": needs.norms,
        "noise": needs.noise,
        "participations": needs.participations,
        "max_staleness": needs.max_staleness,
        "facts": sorted(needs.facts),
        "inner products": needs.products,
    }


def _check_first_values(rule: Rule, dtype: str) -> None:
    """Reject a rule whose vectors start at a value that the dtype cannot represent."""
    for name, first in rule.rule_vectors.items():
        if not first < float(np.finfo(dtype).max):
            raise AffluxError(f"[Server] {rule.name} starts its {name} at {first}, which {dtype} cannot hold")
