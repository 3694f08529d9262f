"""`afflux store`: facts, checks and repair of a server's folder, and export of its rows; works without the rule."""

import argparse
import csv
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from shlex import quote

from afflux import store
from afflux.aggregation.reports import DECISIONS
from afflux.cli.common import Parser, add_command, echo
from afflux.ops.errors import AffluxError, StoreError
from afflux.ops.units import in_bytes
from afflux.ops.validation import brief, plain_id, printable
from afflux.rules.rule import ClientId
from afflux.store import Health, Info
from afflux.store.metadata import BACKUP, INDEX
from afflux.store.reader import StoreReader, locked_reader

INFO_HELP = """Print the facts about a store: clients, rows, version, sizes, health.

Reads the index and checks that all files exist, also while a server uses the
store; the exit code is 1 if one is missing or too short. `afflux store check`
reads every byte.

Examples:
  afflux store info runs/ca2fl.store
  afflux store info runs/ca2fl.store --json
"""
CHECK_HELP = """Read every byte of a store: all checksums, the index, the sum of the rows against the rows.

Writes nothing. Exit code 0: sound; 1: damaged; 2: it cannot be opened, or a
server uses it.

Examples:
  afflux store check runs/ca2fl.store
"""
REPAIR_HELP = """Drop damaged rows and waiting arrivals of clients, and recompute the sum of the rows.

If a file of rows is missing or cut off, the rows in the missing part are
damaged. The server treats clients of dropped rows as never seen. All later bits
differ from those without the damage; the store records the version, and `afflux
store info` shows it. Asks before it drops anything, and names the clients.

Examples:
  afflux store repair runs/ca2fl.store
  afflux store repair runs/ca2fl.store --yes
"""
RESHARD_HELP = """Write a store again with another number of shards; later bits do not change.

The new folder takes the store's place when it is complete. Until then both need
their space, which is checked first.

Examples:
  afflux store reshard runs/ca2fl.store --shards 4
"""
EXPORT_HELP = """Write clients' rows, decoded, or the model's params to a file that NumPy reads.

Examples:
  afflux store export runs/ca2fl.store --out rows.npz
  afflux store export runs/ca2fl.store --clients 3,17,4 --out rows.npy
  afflux store export runs/ca2fl.store --clients 'ann,"Smith, Bob"' --out rows.npz
  afflux store export runs/ca2fl.store --params --out model.npz
"""

#: The outcome of a push, by the name of its count; see `Server.counts`.
ENDS = {
    "joined": "in a step, or waiting",
    "replaced": "instead of an earlier one of its client",
    "superseded": "an arrival of its client from a newer version waited",
    "rejected": "an arrival of its client waited, or its client had entered in the pass or in as many rounds as it may",
    "dropped": "older than max_staleness",
    "empty": "no examples",
    "expired": "its task was closed, or its version gone",
    "faulty": "recorded in Server.faults",
    "refused": "with an error",
}
#: Lines of a list that are printed without --all.
MOST = 20


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the group of commands."""
    text = "Facts about a store; check, repair and export."
    group = commands.add_parser("store", help=text, description=text).group()
    texts = {info: INFO_HELP, check: CHECK_HELP, repair: REPAIR_HELP, reshard: RESHARD_HELP, export: EXPORT_HELP}
    for run, text in texts.items():
        parser = add_command(group, run, text)
        parser.add_argument("path", type=Path, metavar="PATH", help="The store's folder.")
        if run in (info, check, repair):
            parser.flag("--all", help="Print every line of a long list.")
        if run in (info, check):
            parser.flag("--json", help="Print JSON.")
        if run is repair:
            parser.flag("--yes", help="Do not ask.")
        if run is reshard:
            parser.option("--shards", type=int, required=True, help="Their number; 1: one piece.")
    text = "A file .npy (rows, or params) or .npz (clients and rows, or the model); replaced."
    parser.option("--out", type=Path, required=True, help=text)
    parser.option("--clients", help="Ids between commas, quoted as in CSV; default: all with a row.")
    parser.flag("--params", help="The params of the last commit, in place of rows.")


def info(arguments: Namespace) -> None:
    """Print the facts about a store (see INFO_HELP)."""
    _refuse_run_folder(arguments.path)
    facts = store.info(arguments.path)
    if arguments.json:
        echo(json.dumps(asdict(facts), indent=2))
    for name, value in () if arguments.json else _lines(facts, arguments.all):
        echo(f"{name:<12}{printable(value)}")
    if facts.problems:
        raise SystemExit(1)


def check(arguments: Namespace) -> None:
    """Read every byte (see CHECK_HELP)."""
    health = _checked(arguments.path)
    if arguments.json:
        echo(json.dumps(asdict(health), indent=2))
    else:
        _print_health(health, arguments.all, f"; {_remedy(arguments.path, health)}")
    if not health.sound:
        raise SystemExit(1)


def repair(arguments: Namespace) -> None:
    """Drop damaged rows (see REPAIR_HELP)."""
    health = _checked(arguments.path)
    _print_health(health, arguments.all)
    if health.sound:
        return
    if health.mendable and not (arguments.yes or _confirm(_question(health))):
        raise SystemExit(1)
    with _bar("repairing") as progress:
        done = store.repair(arguments.path, progress, agreed=None if arguments.yes else health)
    if done is None:
        echo("repaired: every file is whole again; no row was lost")
    else:
        lost = [_counted(len(done.dropped), "row")] if done.dropped or not done.arrivals else []
        lost += [f"the waiting arrivals of clients {_named(done.arrivals, arguments.all)}"] if done.arrivals else []
        echo(f"repaired: {' and '.join(lost)} dropped; bit continuity ends at version {done.version}")


def reshard(arguments: Namespace) -> None:
    """Write a store again with other shards (see RESHARD_HELP)."""
    _refuse_run_folder(arguments.path)
    with _bar("writing") as progress:
        done = store.reshard(arguments.path, arguments.shards, progress)
    echo(f"{arguments.path} has {_counted(arguments.shards, 'shard')}{'' if done else ' already'}")


def export(arguments: Namespace) -> None:
    """Write rows or params to a file (see EXPORT_HELP)."""
    path, out, clients = arguments.path, arguments.out, arguments.clients
    _refuse_run_folder(path)
    if arguments.params:
        if clients is not None:
            raise AffluxError("[export] give --clients for rows, or --params")
        echo(f"wrote params of version {store.export_params(path, out)} to {out}")
        return
    written = store.export(path, out, None if clients is None else _ids(path, clients))
    echo(f"wrote {_counted(len(written), 'row')} to {out}")


def _checked(path: Path) -> Health:
    _refuse_run_folder(path)
    with _bar("checking") as progress:
        return store.check(path, progress)


def _confirm(question: str) -> bool:
    """Ask for a yes on the terminal; the end of the input is a no."""
    try:
        return input(f"{question} [y/N]: ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _ids(path: Path, text: str) -> list[ClientId]:
    """Return the clients that a line of CSV names."""
    try:
        ((*names,),) = csv.reader([text], skipinitialspace=True, strict=True)
        if names:
            with locked_reader(path) as reader:
                return [_client(reader, name) for name in names]
    except csv.Error:
        pass
    raise AffluxError(f"[export] clients is {brief(text)}, must be ids between commas, quoted as in CSV")


def _client(reader: StoreReader, text: str) -> ClientId:
    """Return the client whose id a text names: a number names the int, or the str if only the str has a row.

    Raises:
        StoreError: a number names two clients that have a row.
    """
    try:
        number = plain_id(int(text))
    except ValueError:  # an AffluxError is one
        return text
    if text != str(number):  # such as 007
        return text
    as_int, as_text = (reader.index.row(client_id) is not None for client_id in (number, text))
    if as_int and as_text:
        raise StoreError(f"[export] {text} names an int and a str in {reader.path}: use afflux.store.export")
    return text if as_text else number


def _lines(facts: Info, whole: bool) -> Iterator[tuple[str, str]]:
    yield "store", facts.path + (", in use" if facts.in_use else "")
    yield "rule", f"{facts.rule}, kind {facts.kind}, M = {facts.rule_config['buffer_size']}"
    shards = f" in {facts.shards} shards" if facts.shards > 1 else ""
    yield "params", f"d = {facts.d:,} {facts.dtype}{shards}; arrivals are kept as {facts.slot_dtype}"
    waiting = f", {facts.waiting} arrivals wait" if facts.waiting else ""
    yield "version", f"{facts.version:,} after {facts.joins:,} pushes{waiting}"
    yield "pushes", _counts(facts.counts)
    if facts.codec is not None:
        yield "clients", f"{facts.clients:,} of {facts.num_clients:,} with a stored row"
        yield "rows", f"{facts.codec}: {facts.bits} bits an element, {in_bytes(facts.bytes_per_client)} a client"
    parts = (f"{name} {in_bytes(size)}" for name, size in facts.disk_bytes.items())
    yield "on disk", f"{in_bytes(sum(facts.disk_bytes.values()))}: {', '.join(parts)}"
    survives = {"process": "survives the end of its process", "power": "survives a power cut"}[facts.durability]
    often = "checkpoints alone" if facts.commit_every is None else f"commit_every {facts.commit_every}"
    yield "durability", f"{facts.durability}, {often}: the last commit {survives}"
    for repair in facts.repairs:
        dropped = f"rows dropped of clients {_named(repair['dropped'], whole) or 'none'}"
        if repair["arrivals"]:
            dropped += f"; arrivals dropped of clients {_named(repair['arrivals'], whole)}"
        yield "repaired", f"at version {repair['version']}, where bit continuity ended; {dropped}"
    for problem in _some(facts.problems, whole):
        yield "health", problem
    if not facts.problems:
        yield "health", "all files exist; their content was not read, `afflux store check` reads it"


def _counts(counts: Mapping[str, int]) -> str:
    """Return the number of pushes by outcome, with the meaning of each outcome."""
    decided, others = list[str](), list[str]()
    for name, count in counts.items():
        if count:
            (decided if name in DECISIONS else others).append(f"{count:,} {name} ({ENDS.get(name, 'unknown')})")
    beside = f"; not counted there: {', '.join(others)}" if others else ""
    return (", ".join(decided) or "none") + beside


def _print_health(health: Health, whole: bool, remedy: str = "") -> None:
    for problem in _some(health.problems, whole):
        echo(printable(problem))
    if health.sound:
        off = "" if health.sum_error is None else f"; the sum is off by {health.sum_error:.2g} of the largest norm"
        echo(f"sound: every checksum holds, {_counted(health.clients, 'row')}{off}")
    else:
        lost = f"{len(health.damaged):,} of {_counted(health.clients, 'row')}" if health.damaged else "no row"
        lost += f" and {_counted(len(health.arrivals), 'waiting arrival')}" if health.arrivals else ""
        echo(f"damaged: {lost} lost{remedy}")


def _refuse_run_folder(path: Path) -> None:
    """Raise AffluxError for the folder of a run; the error names the store of the run, if it is near."""
    if (path / "audit").is_dir() and not (path / INDEX).exists():
        place = _store_of(path)
        rest = ", and no store" if place is None else f"; its store is {place}"
        raise AffluxError(f"{path} is the folder of a run, with audit/{rest}")


def _store_of(run: Path) -> Path | None:
    """Return the store with the id of the run in this folder, in the working folder or up to two levels above."""
    with suppress(OSError, UnicodeError):
        run_id = (run / "audit" / "run_id.txt").read_text("ascii")
        for folder in (Path(), run.resolve().parent, run.resolve().parent.parent):
            for place in islice(folder.iterdir(), 1000):
                with suppress(AffluxError):
                    notes = store.info(place).notes if (place / INDEX).is_file() else None
                    if isinstance(notes, dict) and notes.get("run_id") == run_id:
                        return place
    return None


def _remedy(path: Path, health: Health) -> str:
    if not health.mendable:
        return BACKUP
    does = "drops them" if health.damaged or health.arrivals else "repairs it"
    return f"`afflux store repair {quote(str(path))}` {does}"


def _question(health: Health) -> str:
    if health.keeps_bits:
        return "repair these files? No row is lost."
    steps = [f"drop {_counted(len(health.damaged), 'row')}"] if health.damaged else []
    steps += [f"drop {_counted(len(health.arrivals), 'waiting arrival')}"] if health.arrivals else []
    steps += ["recompute the sum"] if health.damaged or not health.arrivals else []
    return f"{' and '.join(steps)}? Later bits will differ from those without the damage."


def _some(lines: Iterable[str], whole: bool) -> list[str]:
    """Return the first lines, and a line with the number of the omitted ones."""
    texts = list(lines)
    more = [] if whole or len(texts) <= MOST else [f"... and {len(texts) - MOST:,} more (--all)"]
    return texts if not more else texts[:MOST] + more


def _named(clients: Iterable[int | str], whole: bool) -> str:
    return ", ".join(_some(map(brief, clients), whole))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar in bytes; nothing if the output is no terminal, or rich is not installed."""
    try:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ModuleNotFoundError:
        yield lambda done, whole: None
        return

    from afflux.cli.lab.terminal import open_console

    console = open_console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, whole: bars.update(task, completed=done, total=whole)
