"""`afflux.plan` estimates the memory that a server then takes, and a memory budget is kept or refused."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from afflux import AffluxError, Server, store
from afflux.aggregation.options import ServerOptions
from afflux.ops.units import in_bytes
from afflux.rules import RULES, ca2fl, fadas, fedbuff
from afflux.server.plan import fitted, plan
from afflux.store.lock import promises_space
from commands import invoke
from conftest import check_error, push_all, ready
from inside import aggregator_of, slots_limit
from variants import VARIANTS, make

SIZE, CLIENTS, M = 1000, 12, 5


def everyone(server, times=1):
    """Every client pushes, `times` times."""
    push_all(server, [*range(CLIENTS)] * times, lambda client: np.full(SIZE, 1.0 + client))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float64"}, {"slot_dtype": "bfloat16"}, {"inplace": True}, {"accumulate": True}], ids=str
)
@pytest.mark.parametrize("name", VARIANTS)
def test_memory_is_what_state_bytes_says(name, options):
    rule = make(name)
    settings = {"duplicates": "both"} if rule.calibrate.cached and "accumulate" not in options else {}
    try:
        server = ready(Server(rule, np.zeros(SIZE), num_clients=CLIENTS, **settings, **options))
    except AffluxError:
        if not options.get("accumulate"):
            raise
        return  # not every rule can stream
    everyone(server)
    server.flush()
    assert rule.needs.passes or server.rows is None or len(server.rows) == CLIENTS
    found = plan(rule, SIZE, num_clients=CLIENTS, **options)
    assert sum(part.size for part in found.memory.values()) == server.state_bytes
    assert ("next params" in found.working) != ("inplace" in options)
    assert found.disk == {}


@pytest.mark.parametrize("commit_every", [1, 2, None])
@pytest.mark.parametrize("rule", [fedbuff(buffer_size=M), fadas(buffer_size=M), ca2fl(buffer_size=M, codec="affine-2")])
def test_disk_is_what_the_store_then_has(rule, commit_every, tmp_path, monkeypatch):
    """Also where an array needs many segments."""
    monkeypatch.setattr("afflux.store.metadata.MOST_SLOTS", 2)
    path = tmp_path / "store"
    with Server(rule, np.zeros(SIZE), num_clients=CLIENTS, store=path, commit_every=commit_every) as server:
        everyone(server, 4)
        server.checkpoint()
        everyone(server, 4)
        for _ in range(2):  # with arrivals that wait, none of them the same
            while server.arrivals_waiting != M - 1:
                everyone_pushes_once(server)
            server.checkpoint()
            everyone_pushes_once(server)
    taken = store.info(path).disk_bytes
    found = plan(rule, SIZE, num_clients=CLIENTS, store=True, commit_every=commit_every)
    for name, part in found.disk.items():
        if name == "arrivals":  # the most that may be
            assert part.size >= taken[name] >= part.size // 2
        elif name != "index":
            assert part.size == taken[name], name
    assert found.memory.keys() == {"buffer"}
    assert found.disk_bytes == sum(part.size for part in found.disk.values())


def everyone_pushes_once(server):
    server.push(client=server.joins % CLIENTS, update=np.ones(SIZE), version=server.version)


@pytest.mark.parametrize("size", [10, 200_000])
def test_the_index_is_about_as_large(size, tmp_path):
    clients, rule = (3000, ca2fl(buffer_size=100)) if size == 10 else (20, ca2fl(buffer_size=10))
    with Server(rule, np.zeros(size), num_clients=clients, store=tmp_path / "store") as server:
        push_all(server, range(clients), np.ones(size))
    taken = store.info(tmp_path / "store").disk_bytes["index"]
    said = plan(rule, size, num_clients=clients, store=True).disk["index"].size
    assert 0.5 * said <= taken <= 1.5 * said


@pytest.mark.parametrize(
    ("codec", "most"), [("rotated-4", 287), ("rotated-2", 159), ("rotated-1", 95), ("affine-8", 79), ("affine-4", 63)]
)
def test_rows_that_are_larger_than_the_vectors_are_named(codec, most):
    """Sizes are rounded up to groups; in memory, in a store and on a GPU."""
    for d, note in ((most, f": more than float32, {in_bytes(4 * most)}"), (most + 1, "")):
        rule, options = ca2fl(buffer_size=M, codec=codec), {"num_clients": CLIENTS}
        parts = plan(rule, d, **options).memory, plan(rule, d, store=True, **options).disk
        for rows in (*(part["rows"] for part in parts), plan(rule, d, store=True, gpu=True, **options).disk["rows"]):
            assert rows.what.endswith(note)
            assert ("more than" in rows.what) == bool(note)


def test_a_budget_that_cannot_be_kept_is_refused_with_the_parts():
    rule = ca2fl(buffer_size=M)
    least = plan(rule, SIZE, num_clients=CLIENTS, max_slots=M).memory_bytes
    assert least == 4 * SIZE * (2 + M + CLIENTS) + 8 * SIZE
    parts = "params 4 kB, buffer 20 kB, sum 8 kB, rows 48 kB, next params 4 kB"
    text = rf"\[Server\] memory_budget is 84 kB, but 84 kB may be needed: {parts}"
    check_error(text, Server, rule, np.zeros(SIZE), num_clients=CLIENTS, memory_budget=least - 1)
    server = Server(rule, np.zeros(SIZE), num_clients=CLIENTS, memory_budget=least)
    assert (slots_limit(server), aggregator_of(server).plane.versions.max_versions) == (M, 2)
    for options in ({"max_slots": M + 1}, {"max_versions": 3}):
        check_error("memory_budget", Server, rule, np.zeros(SIZE), num_clients=CLIENTS, memory_budget=least, **options)
    check_error("d is -1", plan, fedbuff(), -1)


def test_slots_and_versions_get_what_is_left():
    def limits(budget, **options):
        options = ServerOptions(memory_budget=budget, **options)
        found = fitted(fedbuff(buffer_size=M), SIZE, options)
        return found.max_slots, found.max_versions

    most, least = slots_limit(Server(fedbuff(buffer_size=M), np.zeros(SIZE))), 4 * SIZE * (2 + M)
    assert limits(least) == (M, 2)
    assert limits(least + 4 * SIZE * 2 + 100) == (M + 2, 2)
    assert limits(least + 4 * SIZE * (most - M + 3)) == (most, 5)
    assert limits(least + 4 * SIZE * 2, max_slots=M) == (M, 4)
    assert limits(least + 4 * SIZE * 2, max_versions=3) == (M + 1, 3)
    assert limits(10**6, accumulate=True)[0] == most - 2 * M + 1
    for options in ({}, {"max_slots": M + 1}, {"accumulate": True}):
        slots, versions = limits(10**5, **options)
        settings = options | {"max_slots": slots, "max_versions": versions}
        assert plan(fedbuff(buffer_size=M), SIZE, **settings).memory_bytes <= 10**5


BUDGET = """
import threading
import numpy as np
from afflux import AffluxError, BusyError, Server
from afflux.rules import ca2fl

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

d, vector = 1_000_000, np.ones(1_000_000, np.float32)
before = anonymous()
budget = 80 * d
server = Server(ca2fl(buffer_size=3), np.zeros(d, np.float32), num_clients=6, memory_budget=budget)
held, refused = [], []

def work(first):
    for client in range(40):
        try:
            held.append(server.pull())
            server.push(client=(first + client) % 6, update=vector, version=server.version)
        except AffluxError as error:
            refused.append(str(error))
            held.clear()

threads = [threading.Thread(target=work, args=(2 * i,)) for i in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert any("max_versions" in text for text in refused), refused
assert server.version > 10
print((anonymous() - before) / budget)
"""


def test_a_budget_is_kept():
    """By threads that push, and hold on to every version that they see."""
    done = subprocess.run([sys.executable, "-c", BUDGET], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.5 < float(done.stdout) < 1.05


def test_a_server_opened_again_keeps_its_limits(tmp_path):
    rule, params, budget = fedbuff(buffer_size=M), np.zeros(SIZE), 4 * SIZE * (M + 1)
    with Server(rule, params, store=tmp_path / "store", memory_budget=budget) as server:
        options = replace(server.options, durability=None, commit_every=1)
    with Server.open(tmp_path / "store") as server:
        assert slots_limit(server) == M + 1
    check_error("memory_budget", Server, rule, params, options)
    assert slots_limit(Server(rule, params, replace(options, memory_budget=None))) == M + 1


def run(*arguments):
    return invoke("plan", *arguments)


def test_the_command_prints_what_the_function_says():
    words = "--rule ca2fl --codec affine-4 --clients 5000 --params 100_000 --buffer 7 --store"
    arguments = words.split()
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = plan(ca2fl(buffer_size=7, codec="affine-4"), 100_000, num_clients=5000, store=True)
    said = json.loads(result.stdout)
    assert {n: size for n, (size, _) in said["disk"].items()} == {name: part.size for name, part in found.disk.items()}
    assert (said["memory_bytes"], said["disk_bytes"]) == (found.memory_bytes, found.disk_bytes)
    lines = run(*arguments).stdout.splitlines()
    assert lines[0] == "memory    buffer              2.8 MB  M = 7 slots, d float32 each"
    assert lines[-1].startswith("          on disk ")
    assert any("N = 5,000 clients, and 7 spare" in line for line in lines)
    assert "memory    params" not in run(*arguments).stdout


@pytest.mark.parametrize("store", [False, True])
def test_the_command_keeps_a_budget_as_the_server_does(store, tmp_path):
    rule, budget = ca2fl(buffer_size=M), 4 * SIZE * (M + 3) + (0 if store else 4 * SIZE * (1 + CLIENTS) + 8 * SIZE)
    arguments = ["--rule", "ca2fl", "--buffer-size", str(M), "--params", str(SIZE), "--clients", str(CLIENTS)]
    arguments += ["--memory-budget", str(budget), *(["--store"] if store else [])]
    said = json.loads(run(*arguments, "--json").stdout)
    kept = {"store": tmp_path / "store"} if store and promises_space(tmp_path) else {}
    if kept or not store:
        server = Server(rule, np.zeros(SIZE), num_clients=CLIENTS, memory_budget=budget, **kept)
        assert (said["max_slots"], said["max_versions"]) == (
            slots_limit(server),
            aggregator_of(server).plane.versions.max_versions,
        )
    assert said["max_slots"] == M + (3 if store else 2)
    assert said["memory_bytes"] <= budget
    last = next(line for line in run(*arguments).stdout.splitlines() if line.startswith("in all"))
    assert last.endswith(
        f"at most, max_slots = {M + 3}" if store else f"at most, max_slots = {M + 2}, max_versions = 2"
    )


@pytest.mark.parametrize("name", RULES)
def test_the_command_knows_every_rule(name):
    result = run("--rule", name, "--params", "1000", "--clients", "50")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith("in all    memory")


def test_the_commands_help_and_mistakes():
    assert "afflux plan --rule fedbuff --params 25_000_000" in run("--help").stdout
    for arguments, message in [
        (["--rule", "ca2fl", "--params", "10"], "error: ca2fl caches a row per client: give --clients"),
        (["--rule", "fedbuff", "--params", "10", "--dtype", "int8"], "error: --dtype is 'int8', must be 'float32' or"),
        (["--rule", "fedbuff", "--params", "10", "--slot-dtype", "int8"], "error: --slot-dtype is 'int8'"),
        (["--rule", "fedbuff:buffer_size=3", "--params", "10", "--buffer", "7"], "--buffer-size is 7, but fedbuff:buf"),
        (["--rule", "fedasync", "--params", "10", "--buffer", "7"], "--buffer-size was given, but fedasync does not"),
        (["--rule", "fedbuff", "--params", "1000", "--memory-budget", "9"], "error: --memory-budget is 9 B, but 48 kB"),
        (["--rule", "gsgm", "--params", "9", "--clients", "9", "--memory-budget", "9"], "error: --memory-budget is 9"),
        (["--rule", "fedbuff", "--params", "10", "--codec", "affine-4"], "--codec was given, but fedbuff does not"),
        (["--rule", "fedbuf", "--params", "10"], "unknown rule 'fedbuf'"),
    ]:
        result = run(*arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert message in result.stderr
    for size in ("0", "-3"):
        assert run("--rule", "fedbuff", "--params", size).exit_code == 2
    rule = ["--rule", "fedbuff:buffer_size=3", "--params", "10"]
    assert run(*rule, "--buffer", "3").stdout == run(*rule).stdout
