"""Saving and loading of a server's state: as plain arrays and JSON, or in a store on disk."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import structs

from afflux import ops
from afflux.aggregation import checkpoint as checkpoints
from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.checkpoint import Saved
from afflux.aggregation.local_plane import LocalPlane, plane_like
from afflux.aggregation.options import ABSENT, Options, ServerOptions, lasting_facts
from afflux.aggregation.plane import DataPlane, Slot, stored_plane
from afflux.aggregation.reports import Pulled
from afflux.aggregation.state import ServerState
from afflux.aggregation.streaming import MOST_SQUARES, term_of
from afflux.arrays.constants import Constants
from afflux.arrays.interop import is_masked
from afflux.arrays.layout import Layout
from afflux.ops.errors import AffluxError, BusyError, StoreError
from afflux.ops.validation import brief, keyword_arguments, optional, path_of
from afflux.rules.rule import Rule, a_rule
from afflux.server.aggregator import Aggregator
from afflux.server.assembly import use_layout
from afflux.server.inputs import InputAdapter
from afflux.server.plan import fitted
from afflux.server.tasks import restore
from afflux.server.versions import shared
from afflux.store.constants_file import constants_of
from afflux.store.creation import create_store, remove_contents, removed_if_it_fails
from afflux.store.files import refuse_irregular
from afflux.store.index import Index
from afflux.store.lock import locked, promises_space
from afflux.store.metadata import INDEX, damage_as_store_error
from afflux.store.store import Store


def for_place(rule: Rule, adapter: InputAdapter, options: ServerOptions, folder: Path | None) -> ServerOptions:
    """Return the options, checked against the device of params and the store, and fitted to the memory budget."""
    gpu = adapter.plane.gpu
    options.for_place(rule, gpu, store=folder is not None)
    if options.memory_budget is None:
        return options
    on_disk = folder is not None and promises_space(folder)
    return fitted(rule, adapter.size, options, store=on_disk, gpu=gpu is not None)


def facts_of(aggregator: Aggregator, layout: Layout | None, options: ServerOptions) -> dict[str, Any]:
    """Return the facts about a server with which a saved state must agree."""
    admission, rule = aggregator.admission, aggregator.rule
    rows = admission.rows
    facts: dict[str, Any] = {
        "rule": rule.name,
        "kind": rule.kind,
        "d": aggregator.size,
        "dtype": options.dtype,
        "slot_dtype": options.slots_as,
        "num_clients": admission.pass_clients if rows is None else rows.num_clients,
        "rule_vectors": list(rule.rule_vectors),
        "layout": None if layout is None else layout.to_json(),
    }
    lasting = lasting_facts(rule, options.slots_as)
    optional_facts = {name: lasting[name] for name, absent in ABSENT.items() if lasting[name] != absent}
    return facts | ({} if rows is None else rows.facts()) | optional_facts


def open_store(
    path: "str | PathLike[str]",
    rule: Rule | None,
    num_threads: int | None,
    like: object,
    plane: object,
    fields: Options,
) -> Store:
    """Check the arguments of `Server.open`, and open the store. `like` is an array on the server's GPU, or None."""
    folder = path_of("open", "path", path)
    optional(a_rule)("open", "rule", rule)
    keyword_arguments("open", fields, Options.__annotations__)
    if not (like is None or hasattr(like, "__dlpack__")):
        raise AffluxError(f"[open] like is of type {type(like).__name__}, must be an array of torch or CuPy")
    if plane is None:
        plane = LocalPlane() if like is None else plane_like("[open] like", like, ["like"])
    elif not isinstance(plane, DataPlane) or like is not None:
        raise AffluxError(f"[open] plane is {brief(plane)}, must be a DataPlane, and without like")
    return Store(folder, ops.threads(num_threads, "open"), plane)


def facts_in(path: Path) -> dict[str, Any] | None:
    """Return the facts of the server in a store; None if there is no store.

    A store without a commit, which an ended process has left, holds no server; its files are removed.

    Raises:
        StoreError: another process uses the store, or it is damaged.
    """
    if not (path / INDEX).exists():
        return None
    with locked(path), damage_as_store_error(path):
        refuse_irregular(path)
        with closing(Index(path / INDEX, read_only=True, alone=True)) as index:
            facts = index.facts()
            committed = index.committed(facts)
        if committed is None:
            remove_contents(path)
            return None
        server: dict[str, Any] = facts["server"]
        return server


def check_model(path: Path, facts: Mapping[str, Any], adapter: InputAdapter) -> None:
    """Raise StoreError if params have other arrays than the model of a store with these facts."""
    with damage_as_store_error(path):
        layout = None if facts["layout"] is None else Layout.from_json(facts["layout"])
    stored, given = _arrays_of(layout, facts["d"]), _arrays_of(adapter.layout, adapter.size)
    for name in (stored | given) if stored != given else ():
        if stored.get(name) != given.get(name):
            there, here = stored.get(name, ("absent",)), given.get(name, ("absent",))
            texts = f"is {' of shape '.join(there)} in the store", " of shape ".join(here)
            if there[0] == here[0]:  # the role is named only if it differs
                texts = f"has shape {there[1]} in the store", here[1]
            raise StoreError(f"[open_or_create] {path} holds another model: {name} {', '.join(texts)} in params")
    if [*stored] != [*given]:
        raise StoreError(f"[open_or_create] {path} holds a model whose arrays have another order than those of params")


def like_params(opened: InputAdapter, given: InputAdapter) -> InputAdapter:
    """Return the adapter of an opened server that returns arrays and objects like those of the given params."""
    given.constants.load(opened.constants.to_bytes())
    return replace(opened, likes=given.likes, rebuild=given.rebuild, constants=given.constants)


def _arrays_of(layout: Layout | None, size: int) -> dict[str, tuple[str, ...]]:
    """Return the role and the shape, as text, of each array of a layout, or of the flat vector, by name."""
    if layout is None:
        return {"params": ("a flat vector", f"({size},)")}
    fields = (*layout.fields, *layout.buffers, *layout.copied, *layout.constants, *layout.locals)
    arrays = {field.name: (f"{field.role} {field.dtype or ''}".rstrip(), f"{field.shape}") for field in fields}
    return arrays | dict.fromkeys(layout.tied, ("an alias",))


@contextmanager
def errors_of_open(path: Path) -> Iterator[None]:
    """Convert errors that name the constructor or `load_state_dict` to errors of `Server.open`."""
    try:
        yield
    except AffluxError as error:
        op, _, subject = str(error).partition("] ")
        if op == "[Server":
            raise AffluxError(f"[open] {subject}") from None
        if op == "[load_state_dict":
            raise StoreError(f"[open] {path}: {subject}") from None
        raise


def start_of(store: Store) -> tuple[ops.Array, ServerOptions]:
    """Return params of zeros, and the options of the server of a store.

    Raises:
        StoreError: the stored size is invalid.
    """
    facts = {name: store.facts[name] for name in ("num_clients", "dtype", "slot_dtype")}
    options = ServerOptions(**facts, **store.options)
    with damage_as_store_error(store.path):
        return store.device.full(store.facts["d"], 0.0, options.dtype), options


def replaced(store: Store, rule: Rule, options: ServerOptions, fields: Options, *, gpu: bool) -> ServerOptions:
    """Return the options of a store, with other values of some fields."""
    budget = fields.get("memory_budget")
    changes: Any = {name: value for name, value in fields.items() if name != "memory_budget"}
    options = options.replaced(rule, changes)
    if budget is not None:
        max_slots, max_versions = fields.get("max_slots"), fields.get("max_versions")
        options = replace(options, memory_budget=budget, max_slots=max_slots, max_versions=max_versions)
        options = fitted(rule, store.facts["d"], options, store=promises_space(store.path), gpu=gpu)
    return replace(options, memory_budget=None)


def make_store(
    aggregator: Aggregator, path: Path, adapter: InputAdapter, options: ServerOptions, num_threads: int | None
) -> Store:
    """Make a store for a new server, and move the server's state there."""
    plane, facts = stored_plane(aggregator.plane), facts_of(aggregator, adapter.layout, options)
    durability = options.durability or ("process" if plane.on_one_node else "power")
    with removed_if_it_fails(path):
        stored, constants = replace(options, durability=durability).stored(), adapter.constants.to_bytes()
        create_store(path, aggregator.rule, facts, stored, constants, plane.cuts(aggregator.size))
        store = Store(path, ops.threads(num_threads), plane, new=True)
        try:
            _move_to(store, aggregator)
        except BaseException:
            remove_contents(path)
            store.close()
            raise
    return store


def _move_to(store: Store, aggregator: Aggregator) -> None:
    """Move the state of a new server into a new store."""
    admission, plane = aggregator.admission, aggregator.plane
    state, now = admission.state, admission.current
    store.vectors.use(plane)
    if plane.gpu is None:
        now = _in_plane(plane, structs.replace(now, params=plane.read(now.params, copy=False)), "Server")
    admission.load(structs.replace(state, current=now, rows=store.rows, log=[]))
    store.checkpoint(admission)
    aggregator.attach(store)


def load_store(
    store: Store, aggregator: Aggregator, adapter: InputAdapter, options: ServerOptions
) -> tuple[InputAdapter, Mapping[int, Pulled]]:
    """Load the last commit of a store into a server with these options, which replace those of the store.

    Returns:
        The server's adapter, and the older versions that the last checkpoint has kept, by number.
    """
    admission, plane = aggregator.admission, aggregator.plane
    options.for_place(aggregator.rule, plane.gpu, store=True)
    store.vectors.use(plane)
    if isinstance(plane, LocalPlane) and plane.gpu is not None:  # without the initial version of this server
        plane.use_versions(None)
    last = store.committed_version()
    now = _on_device(last, aggregator)
    admission.load(structs.replace(admission.state, current=now, rows=store.rows, log=[]))
    saved = store.load(facts_of(aggregator, store.layout, options), admission)
    _prepare_next_rule(saved, aggregator, options)
    arrivals = arrivals_of(saved, aggregator)
    older = store.retained_versions(last)
    retained = {held.version: now if held is last else _on_device(held, aggregator) for held in older}
    state = store.attach(structs.replace(saved.state, current=now, waiting=arrivals), last.params, older)
    admission.load(state)
    store.replace_options(options)
    aggregator.attach(store)
    restore(admission, store.open_tasks(), {**retained, now.version: now})
    admission.compact_task_events()
    aggregator.retained = {version: kept for version, kept in retained.items() if version in store.asked}
    adapter = replace(adapter, layout=store.layout, constants=constants_of(store.path, store.layout))
    use_layout(admission, adapter, options, plane.grow(aggregator.max_slots))
    retained = {version: shared(aggregator, kept) for version, kept in aggregator.retained.items()}
    return adapter, MappingProxyType(retained)


def _on_device(version: Pulled, aggregator: Aggregator) -> Pulled:
    """Return a version of a store, on the server's device."""
    plane = aggregator.plane
    return version if plane.gpu is None else _in_plane(plane, version, "Server")


def _in_plane(plane: DataPlane, version: Pulled, op: str) -> Pulled:
    """Return a version whose params are an array of NumPy, as one of the plane. `op` is the call that needs it."""
    return structs.replace(version, params=plane.version(partial(plane.fill, values=version.params), op))


def load_state(aggregator: Aggregator, state: Mapping[str, Any], adapter: InputAdapter, options: ServerOptions) -> None:
    """Load a state_dict. All new objects are made before any old one is replaced."""
    facts = facts_of(aggregator, adapter.layout, options)
    admission, plane = aggregator.admission, aggregator.plane
    saved = checkpoints.load(state, facts, admission)
    _prepare_next_rule(saved, aggregator, options)
    try:
        arrivals, uncounted = arrivals_of(saved, aggregator), False
    except BusyError:  # the arrivals that the state replaces are in the slots
        arrivals, uncounted = arrivals_of(saved, aggregator, partial(plane.reserve, counted=False)), True
    rule_vectors = {name: plane.vector(np.asarray(vector)) for name, vector in saved.state.rule_vectors.items()}
    constants = _saved_constants(state)  # before the version, which with inplace is the server's own params
    new_state = structs.replace(saved.state, waiting=arrivals, rule_vectors=rule_vectors)
    install = partial(_install, aggregator, adapter, new_state, constants)
    aggregator.make_room()
    before = admission.current
    try:
        new_state = install()
    except BaseException:  # an interrupt: with inplace the server's own params may be those of the state
        if aggregator.inplace or admission.current is not before:
            install()
        raise
    if uncounted and not aggregator.accumulate:
        with suppress(BusyError):  # other threads have taken slots for their pushes: the vectors stay where they are
            admission.load(structs.replace(new_state, waiting=arrivals_of(saved, aggregator)))


def _install(
    aggregator: Aggregator, adapter: InputAdapter, state: ServerState, constants: Constants | None
) -> ServerState:
    """Make a saved state, whose params are an array of NumPy, that of a server; return it. May be repeated."""
    state = structs.replace(state, current=_in_plane(aggregator.plane, state.current, "load_state_dict"))
    aggregator.admission.load(state)
    if constants is not None:
        adapter.constants.replace(constants)
    return state


def _saved_constants(state: Mapping[str, Any]) -> Constants | None:
    """Return the constants and local arrays of a state that `load` has checked; None if it has none.

    Raises:
        AffluxError: the array has another size or dtype than its layout says.
    """
    data, layout = state["arrays"].get("constants"), state["meta"]["layout"]
    if data is None or layout is None:
        return None
    own = Layout.from_json(layout)
    constants, values = Constants((*own.constants, *own.locals)), np.asarray(data)
    if values.dtype != np.uint8 or values.shape != (constants.nbytes,) or is_masked(data):
        found = f"{values.dtype} of shape {values.shape}"
        raise AffluxError(f"[load_state_dict] constants is {found}, expected uint8 of shape ({constants.nbytes},)")
    constants.load(values)
    return constants


def _prepare_next_rule(saved: Saved, aggregator: Aggregator, options: ServerOptions) -> None:
    """Check the waiting rule of a saved state, and add slots for its arrivals."""
    rule = saved.state.next_rule
    if rule is None:
        return
    try:
        options.for_replacement(saved.state.rule, rule)
    except AffluxError as error:
        why = str(error).removeprefix("[Server] ")
        raise AffluxError(f"[load_state_dict] the rule that waits to replace this one: {why}") from None
    aggregator.grow(options.slots_of(rule))


def arrivals_of(
    saved: Saved, aggregator: Aggregator, take: Callable[[], Slot | None] | None = None
) -> list[PendingArrival]:
    """Return the arrivals of a saved state, with vectors in the server's own memory. An error changes nothing.

    `take` returns a slot, or None; the default is a slot of the server.

    Raises:
        BusyError: `take` has returned None.
        AffluxError: the server cannot hold these arrivals.
    """
    take = take or aggregator.plane.reserve
    if len(saved.raw) and not aggregator.accumulate:
        raise AffluxError(
            f"[load_state_dict] {len(saved.raw)} arrivals wait as one sum in the state, and accumulate=False needs the "
            "vectors: load it with accumulate=True, or save it after a flush() or discard()"
        )
    if aggregator.accumulate:
        return _accumulated(saved, aggregator, take)
    return [_filled(take(), arrival, aggregator) for arrival in saved.state.waiting]


def _accumulated(saved: Saved, aggregator: Aggregator, take: Callable[[], Slot | None]) -> list[PendingArrival]:
    """Return the arrivals for a server that accumulates. A buffered state's vectors are added, through one slot."""
    total, arrivals, slot = [aggregator.plane.total(saved.total)], list(saved.state.waiting), None
    for place, arrival in enumerate(arrivals):
        if place >= len(saved.raw):
            slot = take() if slot is None else slot
            arrival = _filled(slot, arrival, aggregator)
            if arrival.norm * arrival.norm > MOST_SQUARES:
                raise AffluxError(
                    f"[load_state_dict] client {brief(arrival.client_id)} waits with the norm {arrival.norm}, too "
                    "large for a sum"
                )
        known = (arrival.staleness, arrival.num_examples, arrival.norm, arrival.facts)
        term = term_of(saved.state.rule, total, place, known, slot)
        if place < len(saved.raw) and term.weight != saved.raw[place]:
            raise AffluxError(
                f"[load_state_dict] client {brief(arrival.client_id)} is in the sum with the raw weight "
                f"{saved.raw[place]}, and this rule gives it {term.weight}: save the state after a flush() or discard()"
            )
        if place >= len(saved.raw):
            term.add(aggregator.plane)
        arrivals[place] = arrival._replace(slot=term)
    return arrivals


def _filled(slot: Slot | None, arrival: PendingArrival, aggregator: Aggregator) -> PendingArrival:
    """Return a saved arrival whose vector is in this slot."""
    slot = aggregator.checked("load_state_dict", slot)
    aggregator.plane.fill(slot, np.asarray(arrival.slot))
    return arrival._replace(slot=slot)


def save_state(aggregator: Aggregator, adapter: InputAdapter, options: ServerOptions) -> dict[str, Any]:
    """Return the state_dict of a server without unfinished rounds."""
    admission, facts = aggregator.admission, facts_of(aggregator, adapter.layout, options)
    state = checkpoints.save(facts, admission.state, aggregator.plane.read)
    if adapter.constants.nbytes:
        state["arrays"]["constants"] = adapter.constants.to_bytes()
    return state


def checkpoint(store: Store, aggregator: Aggregator, notes: object, keep: Iterable[Pulled]) -> dict[int, Pulled]:
    """Commit the state of a server without unfinished rounds, with the versions of `keep`.

    Versions that are held for tasks are also committed.

    Returns:
        The versions of `keep`, by number.
    """
    versions = retained(keep)
    _commit(store, aggregator, notes_as_json(notes), versions)
    aggregator.retained = versions
    return versions


def commit(store: Store, aggregator: Aggregator) -> None:
    """Commit the state of a server without unfinished rounds, unless only checkpoints commit."""
    if store.commit_every is not None:
        _commit(store, aggregator, store.notes, aggregator.retained)


def _commit(store: Store, aggregator: Aggregator, notes: str | None, kept: Mapping[int, Pulled]) -> None:
    """Commit a server without unfinished rounds, with the versions of `kept` and those that are held for tasks.

    With max_versions, three versions always have space: the newest one, the last commit's, and the one being written.
    The remaining space is for the versions of tasks, the newest first.
    """
    admission, most = aggregator.admission, aggregator.max_versions
    admission.compact_task_events()
    held, newest = admission.bases(), admission.version
    only_for_tasks = sorted(held.keys() - kept.keys() - {newest}, reverse=True)
    room = len(only_for_tasks) if most is None else max(0, most - 3 - len(kept.keys() - {newest}))
    for_tasks = {version: held[version] for version in [*only_for_tasks[:room], *held.keys() & {newest}]}
    store.checkpoint(admission, notes, [*{**for_tasks, **kept}.values()], sorted(kept))


def close(store: Store, aggregator: Aggregator, *, checkpoint: bool) -> None:
    """Close a store, after a last checkpoint if `checkpoint` is true and a checkpoint is possible. May be repeated."""
    if aggregator.admission.closed:
        if not store.closed:  # an interrupt came first
            aggregator.locked(partial(store.close, detach=True))
        return
    checkpoint = checkpoint and not aggregator.admission.failure

    def end() -> None:
        if checkpoint:
            _commit(store, aggregator, store.notes, aggregator.retained)
        aggregator.admission.close()
        store.close(detach=True)

    if checkpoint:
        aggregator.when_idle("close", end)
        return
    with suppress(StoreError):  # of a round that cannot be saved
        aggregator.when_idle("close", end)
    if not aggregator.admission.closed:
        aggregator.when_no_job_runs(end)


def forget(store: Store, aggregator: Aggregator) -> None:
    """Close the store of a garbage-collected server, without a checkpoint.

    Do nothing in a forked child, or while the interpreter shuts down.
    """
    if sys.is_finalizing():
        return
    with suppress(Exception):
        aggregator.check_process("close")  # raises in a forked child: the store is its parent's
        aggregator.admission.close()
        store.close(detach=True)


def retained(keep: Iterable[Pulled]) -> dict[int, Pulled]:
    """Return the versions of checkpoint(keep=...) by number. The store checks that they are the server's."""
    try:
        versions = list(keep)
    except TypeError:
        raise AffluxError(
            f"[checkpoint] keep is of type {type(keep).__name__}, must be a list of pulled versions"
        ) from None
    for i, pulled in enumerate(versions):
        if not isinstance(pulled, Pulled):
            raise AffluxError(
                f"[checkpoint] keep[{i}] is of type {type(pulled).__name__}, must be one that pull() gave"
            )
    return {pulled.version: pulled for pulled in versions}


def notes_as_json(notes: object) -> str:
    """Return the notes of a checkpoint in their stored form."""
    try:
        return json.dumps(notes)
    except (TypeError, ValueError, RecursionError) as error:
        raise AffluxError(f"[checkpoint] notes cannot be kept as JSON: {error}") from None
