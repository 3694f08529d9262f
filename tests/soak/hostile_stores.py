"""Damaged and made-up stores: each ends in an error of ours or in a server that works, within 5 s of CPU time and
1 GiB, and nothing is written outside the folder.

    python tests/soak/hostile_stores.py COUNT FILE    counts outcomes in FILE, and goes on where it was stopped
"""

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    for folder in ("", "/oracle", "/support", "/soak"):
        sys.path.insert(0, f"{Path(__file__).parent.parent}{folder}")

import numpy as np

from afflux import AffluxError, Server, UnavailableError, store
from afflux.rules import ca2fl, fadas, fedbuff, gsgm, mf_ca2fl
from crashes import in_child, told
from forged import DEEP, LISTS, dumped, fact_names, forge_fact, forge_list, forge_row, forge_state, index

SECONDS, MEMORY = 5, 1 << 30
MODEL = {"w": np.ones((5, 4), np.float32), "running_mean": np.ones(4, np.float32)}
CLIENTS = 9
BASES = {
    "ca2fl": (lambda: ca2fl(buffer_size=3), {"num_clients": CLIENTS}),
    "mf_ca2fl": (lambda: mf_ca2fl(buffer_size=3, bits=2), {"num_clients": CLIENTS, "log": True}),
    "gsgm": (lambda: gsgm(buffer_size=3), {"num_clients": CLIENTS}),
    "sum": (lambda: fedbuff(buffer_size=3), {"accumulate": True, "log": True}),
    "fadas": (
        lambda: fadas(buffer_size=3),
        {"dtype": "float64", "slot_dtype": "bfloat16", "facts": ("q",), "log": True},
    ),
}
#: Stand in the place of any value.
EVIL = [
    *(None, True, False, -1, 0, 1, 2, 255, 2**31, 2**40, 2**63 - 1, 2**63, 10**30, 1.5, -0.0, 1e308, float("inf")),
    *(float("nan"), "", "x", "../../victim", "/dev/zero", "a" * 100_000, "\ud800", [], [[]], [5, 2**40, []], {}),
    *({"evil": 1}, {"part": "rule"}, DEEP),
]
STATEMENTS = [
    "CREATE VIEW evil AS SELECT * FROM facts",
    "CREATE TRIGGER evil AFTER INSERT ON log BEGIN DELETE FROM rows; END",
    "CREATE TABLE evil (a)",
    "CREATE INDEX evil ON log (entry)",
    "DROP TABLE tasks",
    "DROP TABLE facts; CREATE VIEW facts AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT 'crc' AS name, i AS value FROM n",
    "DROP TABLE log; CREATE VIEW log AS WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS number, '00000000' AS entry FROM n",
    "PRAGMA user_version = 4",
    "DELETE FROM state",
    "DELETE FROM vectors",
    "DELETE FROM rows",
    "UPDATE rows SET slot = 'x'",
    "UPDATE rows SET crc = x''",
    "UPDATE state SET meta = x'ff'",
    "UPDATE facts SET value = x'ff'",
    "PRAGMA journal_mode = DELETE",
    "INSERT INTO rows VALUES (1.5, 0, 0, x'00')",
]


def make_bases(folder):
    """Stores at rest, one of each kind, with whatever a store may hold."""
    for name, (rule, options) in BASES.items():
        with Server(rule(), MODEL, store=folder / name, **options) as server:
            use(server, 11)
            server.checkout(5)
            server.checkpoint({"note": [1, {"a": None}]}, keep=[server.pull()])
            use(server, 2)
    return folder


def use(server, count):
    for _ in range(count):
        value, client = float(server.joins % 7) + 0.5, server.joins % CLIENTS
        tree = {"w": np.full((5, 4), value, np.float32)}
        facts = dict.fromkeys(server.options.facts, value) or None
        arguments = {server.rule.kind: tree, "buffers": np.full(4, value), "facts": facts}
        server.push(client=client, version=server.version, **arguments)


def nodes(value, path=()):
    """The paths to all values inside a value."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(child, (*path, key))


def replaced(value, chance):
    """A value with one of its parts replaced, removed, doubled or added."""
    paths = [*nodes(value)]
    path = paths[chance.integers(len(paths))]
    evil = EVIL[chance.integers(len(EVIL))]
    if not path:
        return evil
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    match chance.integers(8):
        case 0:
            del parent[path[-1]]
        case 1 if isinstance(parent, list):
            parent.insert(path[-1], parent[path[-1]])
        case 1:
            parent[str(evil)[:50]] = parent[path[-1]]
        case _:
            parent[path[-1]] = evil
    return value


def plant(path, chance, victim):
    """Puts something else in the place of a file or folder, or where one will be made."""
    named = [
        *("lock", "zarr.json", "zarr.json.new", ".again", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"),
        *("index.sqlite-journal", "params", "params/c", "params/c/0", "params/c/1", "params/c/1/0", "params/zarr.json"),
        *("params/zarr.json.new", "arrivals/c/0/0", "arrivals/zarr.json.new", "rows/c/0/0", "rows/zarr.json.new"),
        *("params/c/0/0", "clients-3.npz.new", "sum/c/0/0"),
    ]
    at = path / named[chance.integers(len(named))]
    if at.is_dir() and not at.is_symlink():
        shutil.rmtree(at)
    at.unlink(missing_ok=True)
    with suppress(FileNotFoundError, FileExistsError):
        at.parent.mkdir(parents=True, exist_ok=True)
    what = int(chance.integers(8))
    match what:
        case 0 | 1:
            at.symlink_to(victim / "file")
        case 2:
            at.symlink_to(victim)
        case 3:
            at.symlink_to(victim / "absent")
        case 4:
            os.mkfifo(at)
        case 5:
            os.link(victim / "file", at)
        case 6:
            at.mkdir()
        case _:
            here = os.getcwd()
            os.chdir(at.parent)  # the path of a socket is short
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(at.name)
            os.chdir(here)
    return f"plant {what} at {at.relative_to(path)}"


def damage(path, chance):
    """Changes the bytes of a file."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    file = files[chance.integers(len(files))]
    content, size = bytearray(file.read_bytes()), file.stat().st_size
    what = int(chance.integers(7))
    at = int(chance.integers(size))
    match what:
        case 0:
            content = content[:at]
        case 1:
            content += bytes(int(chance.integers(1, 5000)))
        case 2:
            content[at] ^= 1 << int(chance.integers(8))
        case 3:
            content[at : at + 512] = chance.bytes(len(content[at : at + 512]))
        case 4:
            content[at : at + 4096] = bytes(len(content[at : at + 4096]))
        case 5:
            content = bytearray()
        case _:
            os.truncate(file, 1 << 40)
            return f"sparse {file.relative_to(path)}"
    file.write_bytes(content)
    return f"damage {what} of {file.relative_to(path)} at {at}"


def forge(path, chance):
    """Writes values that cannot be, with checksums that agree."""
    what = int(chance.integers(12))
    match what:
        case 0 | 1 | 2 | 3:
            names = fact_names(path)
            name = names[chance.integers(len(names))]
            forge_fact(path, name, lambda fact: replaced(fact, chance))
            return f"fact {name}"
        case 4 | 5 | 6:
            part = ("meta", "meta", "notes")[chance.integers(3)]
            forge_state(path, lambda found: found.update({part: replaced(found[part], chance)}))
            return f"state {part}"
        case 7:
            forge_state(path, lambda found: found.update(buffers=[None, b"", b"123", bytes(8000)][chance.integers(4)]))
            return "state buffers"
        case 8:
            part = ("vectors", "arrivals")[chance.integers(2)]
            forge_state(path, lambda found: replaced_entry(found[part], chance))
            return f"entry of {part}"
        case 9:
            table = LISTS[chance.integers(3)]
            forge_list(path, table, lambda entries: as_list(replaced(entries, chance)))
            return f"list {table}"
        case 10:
            evil = EVIL[chance.integers(17)]
            column = ("client", "place", "slot", "crc")[chance.integers(4)]
            with suppress(TypeError):  # a store without rows
                forge_row(path, int(chance.integers(CLIENTS)), {column: evil})
            return f"row's {column} {evil!r}"
        case _:
            file = (files := sorted(path.rglob("zarr.json")))[chance.integers(len(files))]
            file.write_text(dumped(replaced(json.loads(file.read_text()), chance)))
            return f"metadata {file.relative_to(path)}"


def as_list(value):
    return value if isinstance(value, list) else [value]


def replaced_entry(entries, chance):
    if entries:
        entry = entries[chance.integers(len(entries))]
        column = int(chance.integers(len(entry)))
        if isinstance(entry[column], list):
            entry[column] = replaced(entry[column], chance)
        else:
            values = [value for value in EVIL if not isinstance(value, list | dict)]
            entry[column] = [*values, b"", b"1234", entry[column]][chance.integers(len(values) + 3)]


def crafted(path, chance, victim):
    """Makes a store hostile; returns a description."""
    match chance.integers(10):
        case 0 | 1:
            return plant(path, chance, victim)
        case 2 | 3:
            return damage(path, chance)
        case 4:
            statement = STATEMENTS[chance.integers(len(STATEMENTS))]
            with index(path) as connection:
                connection.executescript(statement)
            return statement
        case _:
            return forge(path, chance)


def attempts(path, tell):
    """Calls every function for stores on a store; reports each outcome."""

    def tried(name, call):
        try:
            call()
        except (AffluxError, UnavailableError):
            tell(f"{name} refused")
            return False
        tell(f"{name} done")
        return True

    def served():
        server = Server.open(path, num_threads=1)
        try:
            use(server, 4)
            server.state_dict()
            tell(f"pull {server.pull().params[0]}")
            assert server.tasks is not None
            assert server.notes is not Ellipsis
            server.checkpoint()
        finally:
            server.close(checkpoint=False)

    tried("info", lambda: store.info(path))
    tried("check", lambda: store.check(path))
    tried("export", lambda: store.export(path, path.parent / "rows.npz"))
    before = digest(path)
    if not tried("open", lambda: Server.open(path, num_threads=1).close(checkpoint=False)):
        assert digest(path) == before, "an open that fails changes the store"
    tried("serve", served)
    tried("repair", lambda: store.repair(path))
    tried("serve again", served)


def digest(path):
    """All that a store holds, without the files that SQLite and locks make; links are not followed."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and not file.is_symlink() and "-" not in file.name and file.stat().st_size < 1 << 30:
            found.update(file.name.encode() + (b"" if file.name == "lock" else file.read_bytes()))
    return found.hexdigest()


def outcome(base, path, seed):
    """What happens with one hostile store: how it was made, and the class of its outcome."""
    chance = np.random.default_rng(seed)
    victim = path / "victim"
    victim.mkdir(parents=True)
    (victim / "file").write_bytes(b"precious")
    folder = shutil.copytree(base, path / "inner" / "store")
    try:
        how = crafted(folder, chance, victim)
    except (OverflowError, UnicodeError, sqlite3.Error) as error:  # what SQLite does not take: the rest is gone
        how = f"half forged: {error}"
    if chance.integers(4) == 0 and not how.startswith("plant"):  # through which SQLite itself would write, or wait
        with suppress(Exception):  # what is damaged already cannot be forged
            how += "; " + forge(folder, chance)

    def body(tell):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(12 * SECONDS)  # for one that waits; other processes may need the CPU
        attempts(folder, tell)

    child, reading = in_child(body)
    words = told(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if found(victim) != [("file", b"precious")] or {"rows.npz", "store"} < {
        one.name for one in (path / "inner").iterdir()
    }:
        return how, "wrote outside"
    if status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        return how, f"hangs after {words[-1:]}"
    if status:
        return how, f"status {status} after {words[-1:]}"
    if "serve done" in words:
        return how, "works"
    return how, "works after repair" if "serve again done" in words else "refused"


def found(victim):
    return sorted((file.relative_to(victim).as_posix(), file.read_bytes()) for file in victim.rglob("*"))


GOOD = {"works", "works after repair", "refused"}


def many(count, file):
    """Hostile stores of each base by turns; `file` counts them."""
    done = Counter(json.loads(file.read_text())) if file.exists() else Counter()
    with tempfile.TemporaryDirectory() as folder:
        bases = make_bases(Path(folder) / "bases")
        while (seed := done.total()) < count:
            name = [*BASES][seed % len(BASES)]
            path = Path(folder) / str(seed)
            how, what = outcome(bases / name, path, seed)
            assert what in GOOD, f"{name}, seed {seed}: {how}: {what}"
            shutil.rmtree(path)
            done[what] += 1
            if done.total() % 100 == 0 or done.total() == count:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(done))
                print(f"{done.total()} of {count} hostile stores: {dict(done)}", flush=True)


if __name__ == "__main__":
    many(int(sys.argv[1]), Path(sys.argv[2]))
