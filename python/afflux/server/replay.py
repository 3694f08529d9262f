"""The log of joins: every decision of a server in its order, which is all that a replay needs beside the vectors."""

from collections.abc import Callable, Iterable
from typing import Any

from afflux import ops
from afflux.aggregation.reports import Cut, Entry, Handed, Join, Replaced
from afflux.arrays.interop import private_copy
from afflux.arrays.layout import Tree
from afflux.ops.errors import AffluxError
from afflux.ops.validation import instance, unreadable
from afflux.rules.rule import Rule
from afflux.rules.serialization import from_config
from afflux.server.inputs import is_tree
from afflux.server.server import Server


def replay(
    log: Iterable[Entry],
    server: Server,
    vector: Callable[[Join], ops.Array | Tree],
    *,
    buffers: Callable[[Join], Tree] | None = None,
    rule_vector: Callable[[Handed], ops.Array] | None = None,
    rule: Callable[[Replaced], Rule] | None = None,
) -> Server:
    """Repeats the decisions of `log` on `server`, one after the other: the same joins give the same bits.

    Args:
        log: `server.log` of a server that was made with log=True.
        server: a fresh server with the rule that the other one was made with, the same params and options; returned.
            Its flush_after does not act meanwhile: the log says which steps were made.
        vector: gives the vector that was pushed, for each Join, as the rule takes it: converted, if it was; the log
            does not keep it. It may be one array, filled anew each time: those that were lent (copy=False) are copied
            here.
        buffers: likewise for the buffers of models that have them.
        rule_vector: likewise for the vectors that were handed in with `Server.set_rule_vector`.
        rule: gives the rule of each `Server.replace_rule`, if it has parts that are not registered; None: it is made
            from its configuration.

    Raises:
        AffluxError: a decision comes out differently: the server or a vector is not the one of the log.

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
        entries = iter(log)
    except Exception as error:
        unreadable("[replay] log", error)
    admission = server._aggregator.admission
    flush_after, admission.flush_after = admission.flush_after, None
    try:
        for entry in entries:
            if isinstance(entry, Join):
                _push(server, entry, vector(entry), None if buffers is None else buffers(entry))
            elif isinstance(entry, Cut):
                (server.flush if entry.kind == "flush" else server.discard)()
            elif isinstance(entry, Handed):
                if rule_vector is None:
                    raise AffluxError(f"[replay] the log has a set_rule_vector({entry.name!r}): give rule_vector=")
                server.set_rule_vector(entry.name, rule_vector(entry))
            elif isinstance(entry, Replaced):
                server.replace_rule(_made(entry) if rule is None else rule(entry))
            # Tasks need not be repeated: vectors are handed in as they were converted.
    finally:
        admission.flush_after = flush_after
    return server


def _made(entry: Replaced) -> Rule:
    try:
        return from_config(entry.config)
    except AffluxError as error:
        raise AffluxError(f"[replay] the log has a replace_rule(), and its rule must be given: {error}") from None


def _push(server: Server, entry: Join, given: "ops.Array | Tree", buffers: "Tree | None") -> None:
    own: Any = {server.rule.kind: private_copy(given) if entry.lent and not is_tree(given) else given}
    receipt = server.push(
        **own,
        client=entry.client_id,
        version=entry.version,
        num_examples=entry.num_examples,
        loss=entry.loss,
        copy=not entry.lent,
        buffers=buffers,
    )
    got = (receipt.join, receipt.status, receipt.staleness)
    if got != (entry.number, entry.status, entry.staleness):
        raise AffluxError(
            f"[replay] join {entry.number} of client {entry.client_id!r} was {entry.status} with staleness "
            f"{entry.staleness}; now join {got[0]} is {got[1]} with staleness {got[2]} {receipt.reason}".rstrip()
        )
