"""The server of a run: a new one, or the one that a store holds."""

from logging import getLogger
from pathlib import Path
from typing import Any

from afflux import Layout, Server, ops
from afflux.aggregation.options import Options
from afflux.integrations._settings import RunSettings, refuse_options
from afflux.ops.errors import AffluxError
from afflux.rules.rule import OnArrival, Rule
from afflux.server.tasks import MOST_BASES

_log = getLogger("afflux")


def open_server(rule: Rule, arrays: Any, settings: RunSettings, num_clients: int, concurrency: int) -> Server:
    """A new server, or the one that the settings' store holds.

    Args:
        rule: of the server; a store's own rule is replaced by it, if they are of one name.
        arrays: the initial model: arrays by name, or a torch module; only its layout counts if the store holds a
            server.
        settings: of the run.
        num_clients: of a new server, if its rule needs it and server_options do not say it.
        concurrency: of the run.

    Raises:
        AffluxError, StoreError: the store holds a server of another rule or model, or is damaged.
    """
    count = ops.threads(settings.num_threads)  # replies are taken in one by one, by all threads
    store = settings.store
    if store is not None and Path(store).is_dir() and any(Path(store).iterdir()):
        server = Server.open(store, rule, num_threads=count, push_threads=count)
        try:
            if server.layout != Layout.of(arrays):
                raise AffluxError(f"[{rule.name}] {store} holds a server of another model")
            refuse_options(server.options.faults, server.options.inplace)
        except BaseException:
            server.close(checkpoint=False)
            raise
        if concurrency > (server.options.max_versions or MOST_BASES):
            _log.warning(
                "The store was made for fewer than %d clients at the same time: some replies will be expired",
                concurrency,
            )
        return server
    options: Options = {"faults": "record", **settings.server_options}
    if rule.calibrate.cached or rule.needs.passes:
        options.setdefault("num_clients", num_clients)
    if concurrency > MOST_BASES - 2:  # each client may train from a version of its own
        options.setdefault("max_versions", concurrency + 2)
    return Server(rule, arrays, store=store, num_threads=count, push_threads=count, **options)


def weighs_by_examples(rule: Rule) -> bool:
    """Whether the rule's weights depend on num_examples, as far as that can be seen."""
    weigh = rule.weigh
    if rule.needs.examples:
        return True
    if isinstance(weigh, OnArrival):
        return weigh.on_arrival(0, 1, 1.0) != weigh.on_arrival(0, 2, 1.0)
    return bool(getattr(weigh, "by_examples", False))
