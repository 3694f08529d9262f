"""The assembly of a new server from its checked options."""

from functools import partial
from types import MappingProxyType
from typing import Any

from afflux import ops
from afflux.aggregation.admission import Admission
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.options import ServerOptions, codec_of, why_unclipped
from afflux.aggregation.plane import PlaneOptions
from afflux.aggregation.reports import Pulled
from afflux.aggregation.state import Participation, ServerState
from afflux.aggregation.streaming import MOST_SQUARES
from afflux.arrays.layout import Tree
from afflux.ops.errors import AffluxError
from afflux.rules.rule import Rule
from afflux.server.aggregator import Aggregator
from afflux.server.checkout import Task
from afflux.server.inputs import InputAdapter
from afflux.server.norm_watch import NormWatch
from afflux.server.step_callbacks import OnStep


def assemble(
    rule: Rule,
    params: "ops.Array | Tree",
    parts: "ops.Array | list[ops.Array]",
    adapter: InputAdapter,
    options: ServerOptions,
    num_threads: int | None,
    on_step: OnStep | None,
    first_version: int = 0,
) -> Aggregator:
    """Return an aggregator at its first version.

    `parts` are the arrays of `params`. `options` are a result of `ServerOptions.for_rule`.

    Raises:
        AffluxError: params or the buffers have a wrong dtype or a non-finite value, or params are too large for a step.
    """
    plane, clients = adapter.plane, options.num_clients
    max_slots = options.slots_of(rule)
    codec = codec_of(rule, options.slots_as)
    memory = plane.allocate(
        PlaneOptions(
            size=adapter.size,
            dtype=options.dtype,
            slot_dtype=options.slots_as,
            slots=max_slots,
            together=1 if options.accumulate else rule.buffer_size,
            num_threads=ops.threads(num_threads),
            max_versions=options.max_versions,
            inplace=options.inplace,
            codec=codec,
            rows_on_host=options.rows_on == "host",
        )
    )
    first = plane.version(partial(adapter.take_in_params, "[Server] params", parts, limits=options.limits), "Server")
    buffers = adapter.flat_buffers("[Server] params", params)
    rows = participation = None
    if codec is not None and clients is not None:
        rows = RowCache(memory, clients, options.seed)
    if rule.needs.passes or rule.needs.participations is not None:
        participation = Participation(clients if rule.needs.passes else None, [], 0)
    state = ServerState(
        current=Pulled(first, first_version, buffers),
        rule=rule,
        rows=rows,
        waiting=[],
        rule_vectors={name: plane.vector(value) for name, value in rule.rule_vectors.items()},
        log=[],
        scalars=MappingProxyType(dict(rule.needs.scalars)),
        participation=participation,
    )
    admission = Admission(options, rule, reporting=on_step is not None)
    admission.load(state)
    use_layout(admission, adapter, options, plane.grow(max_slots))
    watched = len(rule.states) > 1 and options.clip_norms is None  # a second moment; a velocity is a first one
    watch = NormWatch() if watched and why_unclipped(rule, accumulate=options.accumulate) is None else None
    return Aggregator(plane, adapter.size, options, admission, on_step, watch)


class RepeatedKey(bytes):
    """A key for simulations, which must give the same noise when they are repeated: a version's nonce is its number."""

    def nonce_of(self, version: int) -> bytes:
        """Return the nonce of the round that makes this version."""
        return version.to_bytes(12, "little")


def noise_of(rule: Rule, key: bytes | None, adapter: InputAdapter) -> ops.Noise | None:
    """Return the key of a server's noise; None if the rule needs none. No message has the key.

    Raises:
        AffluxError: the key is not 32 bytes, is missing or not needed; or params have buffers.
    """
    if not rule.needs.noise:
        if key is not None:
            raise AffluxError(f"[Server] noise_key: {rule.name} adds no noise")
        return None
    if not isinstance(key, bytes) or len(key) != 32:
        raise AffluxError(f"[Server] {rule.name} adds noise: noise_key must be 32 bytes, as of secrets.token_bytes(32)")
    if adapter.layout is not None and adapter.layout.buffers_size:
        raise AffluxError(f"[Server] {rule.name} adds noise, and params have buffers, which would have none")
    return ops.Noise(0.0, key, bytes(12))


def use_layout(admission: Admission, adapter: InputAdapter, options: ServerOptions, pools: tuple[Any, ...]) -> None:
    """Let the decisions be about models of the adapter's layout. With pools of slots the ledger itself takes in plain
    vectors and trees of pushes, if the rule's pushes have no facts.
    """
    admission.averaged = None if adapter.layout is None else adapter.layout.averaged_size
    if pools and not (admission.rule.needs.facts or options.accumulate):
        bounds = admission.limits.max_abs, admission.limits.max_norm, MOST_SQUARES
        arrays = adapter.plain_arrays(options.slots_as)
        size = adapter.kind, adapter.size, adapter.num_threads
        admission.take_vectors((*size, *bounds, pools, *arrays, Pulled, Task))
