"""The server of a run: a new one, or that of a store."""

from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from afflux import Layout, Pulled, Server, ops
from afflux.aggregation.admission import MOST_BASES
from afflux.aggregation.options import Options
from afflux.aggregation.reports import Report
from afflux.arrays.interop import on_host
from afflux.arrays.roles import Roles, declared_names
from afflux.integrations._settings import RunSettings, refuse_options
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import EXAMPLES, OnArrival, Rule, raw_weight

_log = getLogger("afflux")


def open_server(rule: Rule, arrays: Any, settings: RunSettings, num_clients: int, concurrency: int) -> Server:
    """Make a new server, or open that of the settings' store.

    Args:
        rule: the rule of the server; it replaces the rule of a store with the same name.
        arrays: the initial model: arrays by name, or a torch module; only its layout counts if the store holds a
            server.
        settings: the settings of the run. A store's server has the options and the roles of its first run where these
            settings have none. Options that `Server.open` may replace are replaced.
        num_clients: that of a new server, if its rule needs it and server_options do not have it.
        concurrency: that of the run.

    Raises:
        AffluxError, StoreError: the store holds a server of another rule, model or roles, or with another value of an
            option that cannot change; or it is damaged.
    """
    options: Options = {**settings.server_options}
    is_resumed = holds_server(settings)
    if weighs_by_examples(rule) and ("facts" in options or not is_resumed):
        options["facts"] = tuple(dict.fromkeys((*options.get("facts", ()), EXAMPLES)))
    count = ops.threads(settings.num_threads)  # replies are pushed one after the other, each by all threads
    store, key = settings.store, _noise_key(rule, settings)
    if store is not None and is_resumed:
        model = Layout.of(arrays, roles=settings.roles)
        server = Server.open(store, rule, num_threads=count, push_threads=count, noise_key=key, **options)
        try:
            _require_model(server, model, store)
            if settings.roles is not None:
                _require_roles(server, model, settings.roles, store)
            refuse_options(server.options.faults, server.options.inplace)
        except BaseException:
            server.close(checkpoint=False)
            raise
        if concurrency > (server.options.max_versions or MOST_BASES):
            text = "The store was made for fewer than %d clients at the same time: some replies will be expired"
            _log.warning(text, concurrency)
        return server
    options.setdefault("faults", "record")
    if keeps_clients(rule):
        options.setdefault("num_clients", num_clients)
    if concurrency > MOST_BASES - 2:  # each client may train from a version of its own
        options.setdefault("max_versions", concurrency + 2)
    layout = None if settings.roles is None else Layout.of(arrays, roles=settings.roles)
    return Server(
        rule, arrays, layout=layout, store=store, num_threads=count, push_threads=count, noise_key=key, **options
    )


def _noise_key(rule: Rule, settings: RunSettings) -> bytes | None:
    """Return the bytes of the settings' noise_key_file; None: there is none.

    Raises:
        AffluxError: the file cannot be read; or there is none, and the rule adds noise.
    """
    path = settings.noise_key_file
    if path is None and rule.needs.noise:
        raise AffluxError(
            f"[settings] {rule.name} adds noise: noise_key_file must be a file of 32 secret bytes, which "
            "`(umask 077; head -c 32 /dev/urandom > FILE)` writes"
        )
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise AffluxError(f"[settings] noise_key_file cannot be read: {error}") from None


def _require_model(server: Server, layout: Layout, store: object) -> None:
    """Check that the server of a store has the arrays of this layout, in any order and roles."""
    before, now = ({} if each is None else _arrays_of(each) for each in (server.layout, layout))
    own = {name for each in (server.layout, layout) if each for name in (*(f.name for f in each.locals), *each.tied)}
    names = [name for name in {**before, **now} if before.get(name) != now.get(name) and name not in own]
    if names or server.layout is None:
        first = names[0] if names else next(iter(now))
        there, here = (each.get(first, "no array of this name") for each in (before, now))
        message = f"[{server.rule.name}] {store} holds a server of another model"
        raise AffluxError(f"{message}: {brief(first)} is {there} there, and {here} in initial arrays")


def _require_roles(server: Server, layout: Layout, declared: Roles, store: object) -> None:
    """Check that arrays of declared roles have them in the server of a store, too."""
    before, names = {} if server.layout is None else server.layout.roles, declared_names(layout.roles, declared)
    for name, role in layout.roles.items():
        if name not in names:
            continue
        stored_role = before.get(name, role)
        if stored_role != role and "alias" not in (stored_role, role):  # which name is an alias depends on the order
            message = (
                f"[{server.rule.name}] {brief(name)} has the role {role!r} by roles=, and {stored_role!r} in {store}"
            )
            raise AffluxError(f"{message}: only a new store can have other roles")


def _arrays_of(layout: Layout) -> dict[str, str]:
    """Return a description of each array by name."""
    fields = (*layout.fields, *layout.buffers, *layout.copied, *layout.constants)
    return {field.name: f"an array of shape {field.shape}" for field in fields}


def holds_server(settings: RunSettings) -> bool:
    """Return whether the settings have a store that holds something."""
    return settings.store is not None and Path(settings.store).is_dir() and any(Path(settings.store).iterdir())


def keeps_clients(rule: Rule) -> bool:
    """Return whether the rule keeps something for each client."""
    return rule.calibrate.cached or rule.needs.passes


def weighs_by_examples(rule: Rule) -> bool:
    """Return whether the rule declares that its weights depend on num_examples."""
    if rule.needs.examples or not isinstance(rule.weigh, OnArrival):
        return rule.needs.examples or bool(getattr(rule.weigh, "by_examples", False))
    facts = tuple([(name, 1.0) for name in rule.needs.facts])
    one, two = (raw_weight(rule, 0, count, 1.0, facts) for count in (1, 2))
    return one != two


def are_zero(server: Server, report: Report, base: Pulled | None) -> bool:
    """Return whether all updates of a step are exactly 0.

    The norms of models do not tell. If clients push models, the new version is compared with `base`, the version before
    the step; None: no version is compared.
    """
    if server.rule.kind != "model":
        return not any(report.norms.tolist())
    if base is None or report.version != base.version + 1:
        return False
    newest = server.pull()  # may make a further step
    return newest.version == report.version and np.array_equal(on_host(base.params), on_host(newest.params))
