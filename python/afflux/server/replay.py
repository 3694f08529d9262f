"""The replay of a server's log: its decisions, in order. A replay needs only the log and the vectors."""

from collections.abc import Callable, Iterable, Sequence
from math import isnan
from typing import Any

from afflux import ops
from afflux.aggregation.reports import Cut, Entry, Handed, Join, NewParams, NoiseNonce, Replaced
from afflux.arrays.layout import Tree
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, instance, unreadable
from afflux.rules.rule import Rule
from afflux.rules.serialization import from_config
from afflux.server.server import Server


def replay(
    log: Iterable[Entry],
    server: Server,
    vector: Callable[[Join], ops.Array | Tree],
    *,
    buffers: Callable[[Join], Tree] | None = None,
    rule_vector: Callable[[Handed], ops.Array] | None = None,
    rule: Callable[[Replaced], Rule] | None = None,
    params: Callable[[NewParams], ops.Array | Tree] | None = None,
) -> Server:
    """Repeat the decisions of `log` on `server`, one after the other. The same joins give the same result bit for bit.

    Args:
        log: `server.log` of a server that was made with log=True.
        server: a new server with the original rule, params, options and noise_key, and the widest limits if
            `Server.open` has changed them; it is also the result.
        vector: a function that returns the pushed vector of each Join, after its conversion if there was one; the log
            does not keep vectors. The function may fill and return the same array each time.
        buffers: the same for the buffers of models that have them.
        rule_vector: the same for the vectors that were set with `Server.set_rule_vector`.
        rule: a function that returns the rule of each `Server.replace_rule`, if the rule has parts that are not
            registered; None: the rule is made from its configuration.

        params: the same for the params that were set with `Server.set_params`.

    Raises:
        AffluxError: a decision differs from that in the log, because the server is not like the original one. Vectors
            are not compared with the original ones: compare the params afterwards.

    >>> import numpy as np
    >>> from afflux.rules import fedbuff
    >>> first, second = (Server(fedbuff(buffer_size=2), np.zeros(3), log=True) for _ in range(2))
    >>> for client in (7, 5, 7):
    ...     _ = first.push(client=client, version=first.version, update=np.full(3, float(client)))
    >>> again = replay(first.log, second, lambda join: np.full(3, float(join.client_id)))
    >>> again.params.tobytes() == first.params.tobytes(), again.arrivals_waiting
    (True, 1)
    """
    instance(Server, "a Server")("replay", "server", server)
    try:
        entries = list(log)
    except Exception as error:
        unreadable("[replay] log", error)
    aggregator = server._aggregator
    admission = aggregator.admission
    by_flush, nonce_of = admission.by_flush, aggregator.nonce_of
    admission.set_replay(True, by_flush)
    firsts = _first_joins(entries)
    aggregator.nonce_of = _LoggedNonce(None)
    try:
        for entry in entries:
            if isinstance(entry, Join):
                if entry.number in firsts:
                    admission.set_replay(True, True)
                _push(server, entry, vector(entry), None if buffers is None else buffers(entry))
            elif isinstance(entry, Cut):
                if entry.kind == "discard":
                    aggregator.discard()
                else:
                    aggregator.flush(joins=entry.joins, ends_pass=entry.kind == "end_pass")
                admission.set_replay(True, by_flush)
            elif isinstance(entry, NoiseNonce):
                aggregator.nonce_of = _LoggedNonce(bytes.fromhex(entry.nonce))
            elif isinstance(entry, Handed):
                if rule_vector is None:
                    raise AffluxError(f"[replay] the log has a set_rule_vector({entry.name!r}): give rule_vector=")
                server.set_rule_vector(entry.name, rule_vector(entry))
            elif isinstance(entry, NewParams):
                if params is None:
                    raise AffluxError("[replay] the log has a set_params(): give params=")
                server.set_params(params(entry))
            elif isinstance(entry, Replaced):
                server.replace_rule(_made(entry) if rule is None else rule(entry))
            # Tasks need not be repeated, because the vectors are already converted.
    finally:
        admission.set_replay(False, by_flush)
        aggregator.nonce_of = nonce_of
    return server


class _LoggedNonce:
    """The nonce of one round."""

    def __init__(self, nonce: bytes | None) -> None:  # None: the log has none
        self._nonce, self._version = nonce, -1  # the version: not known yet

    def __call__(self, version: int) -> bytes:
        if self._nonce is None or self._version not in (-1, version):
            raise AffluxError(f"[replay] the log has no nonce for the noise of version {version}")
        self._version = version
        return self._nonce


def _first_joins(entries: Sequence[Entry]) -> set[int]:
    """Return the number of the first join of each step whose joins have filled the buffer, and made no round."""
    numbers, firsts = list[int](), set[int]()
    for entry in entries:
        if isinstance(entry, Join):
            numbers.append(entry.number)
        elif isinstance(entry, Cut) and entry.joins:
            firsts.update(numbers[-entry.joins :][:1])
    return firsts


def _made(entry: Replaced) -> Rule:
    try:
        return from_config(entry.config)
    except AffluxError as error:
        raise AffluxError(f"[replay] the log has a replace_rule(), and its rule must be given: {error}") from None


def _push(server: Server, entry: Join, update: "ops.Array | Tree", buffers: "Tree | None") -> None:
    arguments: Any = {server.rule.kind: update}
    receipt = server.push(
        **arguments,
        client=entry.client_id,
        version=entry.version,
        num_examples=entry.num_examples,
        loss=None if isnan(entry.loss) else entry.loss,
        local_steps=entry.local_steps or None,
        facts=dict(entry.facts) or None,
        buffers=buffers,
    )
    now = (receipt.join, receipt.status, receipt.staleness)
    if now != (entry.number, entry.status, entry.staleness):
        raise AffluxError(
            f"[replay] join {entry.number} of client {brief(entry.client_id)} was {entry.status} with staleness "
            f"{entry.staleness}; now join {now[0]} is {now[1]} with staleness {now[2]} {receipt.reason}".rstrip()
        )
