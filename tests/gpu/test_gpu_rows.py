"""Servers on a GPU whose cached rows are kept on the host, in memory or in a store: the CPU's bits; nothing is lost."""

import sys
from functools import partial

import numpy as np
import pytest

import afflux.aggregation.cache.staging
from afflux import BusyError, Server, StoreError
from afflux.arrays.gpu import device_of
from afflux.arrays.interop import on_host as to_numpy
from afflux.rules import afa_cs, ca2fl, fadas, fedbuff, fedstale, mf_ca2fl, wkafl
from afflux.server.inputs import InputAdapter
from afflux.server.plan import plan
from afflux.store import check
from afflux.store.segments import Segments
from commands import invoke
from conftest import bits, check_error, check_raises, push_all, raising
from device import emulated, libraries, needs_device, on_host
from held_up import start
from inside import aggregator_of, index_of, slots_limit, store_of
from stores import same

pytestmark = needs_device
D, CLIENTS, M = 3000, 6, 3
RULES = [
    ca2fl(buffer_size=M),
    ca2fl(buffer_size=M, codec="bfloat16"),
    mf_ca2fl(buffer_size=M, bits=4),
    fedstale(buffer_size=M, beta=0.3),
    fedstale(buffer_size=M, beta=0.3, codec="affine-4"),
    mf_ca2fl(buffer_size=M, bits=2, codec="rotated"),
    afa_cs(buffer_size=M),
]


@pytest.fixture(params=list(libraries()))
def moved(request):
    """To the device, into an array of a library."""
    with on_host():
        yield libraries()[request.param]


@pytest.fixture
def path(tmp_path):
    """Of a new store."""
    return tmp_path / "store"


@pytest.fixture(params=["host", "store"])
def kept(request):
    """Where the rows are, as options of a server."""
    return {"rows_on": "host"} if request.param == "host" else {"store": request.getfixturevalue("path")}


def vector(k):
    return np.random.default_rng(k).standard_normal(D).astype(np.float32)


def made(rule, put, **options):
    return Server(rule, put(vector(99)), **{"num_clients": CLIENTS, "max_staleness": 6, **options})


def some_pushes(server, count, clients=CLIENTS):
    for _ in range(count):
        rng = np.random.default_rng(server.joins)
        version = max(0, server.version - server.joins % 3)
        push_all(server, [int(rng.integers(clients))], vector(server.joins), version=version)


def in_turn(server, count):
    """Pushes of one client after the other."""
    push_all(server, (server.joins % CLIENTS for _ in range(count)), lambda _: vector(server.joins))


@pytest.mark.parametrize("duplicates", ["latest", "both"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.calibrate.codec}")
def test_rows_on_the_host_have_the_bits_of_the_cpu(rule, duplicates, kept, moved):
    here, there = made(rule, np.array, duplicates=duplicates), made(rule, moved, duplicates=duplicates, **kept)
    for _ in range(30):
        for server in (here, there):
            some_pushes(server, 1)
    same(here, there)
    assert here.version >= 5
    kind = type(there.params)
    for client in range(CLIENTS):
        ours, theirs = here.rows.row(client), there.rows.row(client)
        assert type(theirs) is kind
        assert bits(to_numpy(theirs)) == bits(ours)
    assert type(there.rows.sum) is kind
    if "store" in kept:
        there.close()
        assert check(kept["store"]).sound


@pytest.mark.parametrize("commit_every", [1, 2, None])
@pytest.mark.parametrize(
    ("rule", "options"),
    [*((rule, {}) for rule in RULES[:3]), (fadas(buffer_size=M), {"dtype": "float64"}), (wkafl(buffer_size=M), {}),
     (fedbuff(buffer_size=M), {"accumulate": True}), (fedbuff(buffer_size=M), {"slot_dtype": "bfloat16"})],
    ids=lambda value: getattr(value, "name", None) or str(value),
)  # fmt: skip
def test_a_store_goes_from_one_device_to_the_other(rule, options, commit_every, moved, path):
    if options.get("slot_dtype") and type(moved(vector(0))).__module__ == "cupy":
        pytest.skip("CuPy has no bfloat16")
    settings = {"commit_every": commit_every}
    here, there = made(rule, np.array, **options), made(rule, moved, store=path, **settings, **options)
    like, old, waited = moved(vector(0)), [], 0
    for to in (None, like, like, None):
        for server in (here, there):
            some_pushes(server, 2 * M + 1)
        same(here, there)
        waited += there.arrivals_waiting
        held = there.pull()
        old.append((held.version, bits(to_numpy(held.params))))
        for server in (here, there):
            some_pushes(server, M)
        kept = [held, *there.retained_versions.values()]
        there.checkpoint(["a note"], keep=kept)
        there.close()
        assert check(path).sound
        there = Server.open(path, rule, like=to, **settings)
        assert type(there.params) is (np.ndarray if to is None else type(like))
        assert there.notes == ["a note"]
        assert (
            sorted((version, bits(to_numpy(held.params))) for version, held in there.retained_versions.items()) == old
        )
        same(here, there)
    assert waited


def test_the_newest_version_may_be_kept(moved, path):
    """Its slot and that of its copy are committed both."""
    rule = fedbuff(buffer_size=1)
    here, there = made(rule, np.array), made(rule, moved, store=path)
    there.checkpoint(keep=[there.pull()])
    for to in (moved(vector(0)), None, moved(vector(0))):
        there.close()
        assert check(path).sound
        there = Server.open(path, rule, like=to)
        assert bits(to_numpy(there.retained_versions[0].params)) == bits(vector(99))
        for server in (here, there):
            some_pushes(server, 3)
        same(here, there)
        there.checkpoint(keep=[*there.retained_versions.values(), there.pull()])


def test_only_versions_of_this_server_are_kept(moved, path):
    server = made(fedbuff(buffer_size=1), moved, store=path)
    first = server.pull()
    server.push(client=1, **{server.rule.kind: vector(1)}, version=0)
    other = made(fedbuff(buffer_size=1), moved).pull()
    check_error(r"\[checkpoint\] keep: version 0 is not a version of this server", server.checkpoint, keep=[other])
    server.checkpoint(keep=[first])
    assert list(server.retained_versions) == [0]


def uploads(monkeypatch, server):
    """The sizes of what is sent to the device from here on."""
    sent, send = [], type(aggregator_of(server).plane.device)._sent
    monkeypatch.setattr(
        type(aggregator_of(server).plane.device),
        "_sent",
        lambda self, source: (sent.append(source.size), send(self, source))[1],
    )
    return sent


def test_each_row_comes_once_and_goes_with_its_arrivals(kept, moved, monkeypatch):
    server = made(ca2fl(buffer_size=M), moved, **kept)
    staging, sent = aggregator_of(server).admission.rows.memory.staging, uploads(monkeypatch, server)
    push_all(server, range(M), vector, version=0)
    assert (sent, len(staging._staged)) == ([], 0)  # nobody has had a row
    push_all(server, (0, 0, 5), vector, version=1)
    assert (sent, len(staging._staged)) == ([D], 1)  # that of client 0: client 5 has no row yet
    server.push(client=1, **{server.rule.kind: vector(1)}, version=1)
    assert (server.version, sent, len(staging._staged)) == (2, [D, D], 0)
    server.push(client=2, **{server.rule.kind: vector(2)}, version=2)
    server.discard()
    check_error("non-finite", server.push, client=2, **{server.rule.kind: np.full(D, np.nan)}, version=2)
    assert len(staging._staged) == 0


def test_a_row_that_a_round_replaces_while_its_client_pushes(kept, moved, monkeypatch):
    """The copy that was begun before is of an older version."""
    here, there = made(ca2fl(buffer_size=M), np.array), made(ca2fl(buffer_size=M), moved, **kept)
    ingest, late = InputAdapter.ingest, []

    def pushes(server, first, *clients):
        push_all(server, clients, lambda client: vector(first + client), version=1)

    def held_up(self, *arguments):
        if late:
            start(partial(pushes, there, *late.pop())).result(600)
        return ingest(self, *arguments)

    for server in (here, there):
        pushes_at = [server.push(client=client, **{server.rule.kind: vector(client)}, version=0) for client in range(M)]
        assert pushes_at[-1].version == 1
    monkeypatch.setattr(InputAdapter, "ingest", held_up)
    late.append((10, 0, 1, 2))
    pushes(there, 20, 1)
    for order in ((10, 0, 1, 2), (20, 1)):
        pushes(here, *order)
    for server in (here, there):
        pushes(server, 30, 0, 2)
        assert server.version == 3
    same(here, there)


@pytest.mark.parametrize("moment", ["sweep", "bring"])
def test_who_pushes_while_its_row_is_written_gets_it_from_the_round(kept, moment, moved, monkeypatch):
    here, there = made(ca2fl(buffer_size=M), np.array), made(ca2fl(buffer_size=M), moved, **kept)
    for server in (here, there):
        push_all(server, range(M), vector, version=0)
        push_all(server, (0, 1), lambda client: vector(10 + client), version=1)
    sent = uploads(monkeypatch, there)
    late, name = [True], {"sweep": "begin_sweep", "bring": "copy_back"}[moment]
    act = getattr(afflux.aggregation.cache.staging.RowStaging, name)

    def amid(self, rows):
        if late and moment == "sweep":
            act(self, rows)
        if late:
            late.clear()
            start(lambda: there.push(client=1, **{there.rule.kind: vector(20)}, version=1)).result(600)
        act(self, rows)

    monkeypatch.setattr(afflux.aggregation.cache.staging.RowStaging, name, amid)
    there.push(client=4, **{there.rule.kind: vector(14)}, version=1)
    assert (there.version, there.arrivals_waiting, sent) == (2, 1, [])
    here.push(client=4, **{here.rule.kind: vector(14)}, version=1)
    here.push(client=1, **{here.rule.kind: vector(20)}, version=1)
    for server in (here, there):
        push_all(server, (0, 2), lambda client: vector(30 + client), version=2)
        assert server.version == 3
    assert sent == [D, D]
    same(here, there)


def test_a_round_amid_the_upload_of_a_row(moved, monkeypatch):
    """What has come meanwhile is the row before that round."""
    first = made(ca2fl(buffer_size=M), np.array)
    push_all(first, range(M), vector, version=0)
    first.push(client=1, **{first.rule.kind: vector(11)}, version=1)
    here, there = made(ca2fl(buffer_size=M), np.array), made(ca2fl(buffer_size=M), moved, rows_on="host")
    for server in (here, there):
        server.load_state_dict(first.state_dict())
    upload, late = type(aggregator_of(there).plane.device).upload, [(0, 2)]

    def push(server, client, k=10):
        server.push(client=client, **{server.rule.kind: vector(k + client)}, version=1)

    def then_the_round(self, row, *, pinned):
        sent = upload(self, row, pinned=pinned)
        sent.wait()
        for client in late.pop() if late else ():
            start(partial(push, there, client)).result(600)
        return sent

    monkeypatch.setattr(type(aggregator_of(there).plane.device), "upload", then_the_round)
    push(there, 1, 20)
    for client, k in ((0, 10), (2, 10), (1, 20)):
        push(here, client, k)
    assert (there.version, there.arrivals_waiting) == (2, 1)
    for server in (here, there):
        push_all(server, (0, 2), lambda client: vector(30 + client), version=2)
    same(here, there)


def test_who_waits_for_a_slot_has_no_row_on_the_device(kept, moved):
    server = made(ca2fl(buffer_size=M), moved, max_slots=M, **kept)
    push_all(server, range(M), vector, version=0)
    held = [aggregator_of(server).plane.reserve() for _ in range(M)]
    check_raises(BusyError, server.push, client=1, **{server.rule.kind: vector(1)}, version=1, timeout=0)
    assert not list(server.rows.memory.staging._staged)
    del held


@pytest.mark.parametrize("back", ["there", "here"])
def test_a_kept_version_that_is_the_newest_counts_once(moved, path, back):
    server = made(fedbuff(buffer_size=1), moved, store=path, max_versions=2)
    old = server.pull()
    server.push(client=1, **{server.rule.kind: vector(1)}, version=0)
    server.checkpoint(keep=[old, server.pull()])
    server.close()
    del server, old
    server = Server.open(path, like=moved(vector(0)) if back == "there" else None)
    assert list(server.retained_versions) == [0, 1]
    server.checkpoint()
    assert server.push(client=1, **{server.rule.kind: vector(2)}, version=1).version == 2
    server.close()


@pytest.mark.parametrize(
    "like", [5, "cuda:0", {"w": 1}, type("Module", (), {})()], ids=lambda like: type(like).__name__
)
def test_like_is_an_array(moved, path, like):
    made(fedbuff(buffer_size=1), moved, store=path).close()
    check_error(rf"\[open\] like is of type {type(like).__name__}", Server.open, path, like=like)
    Server.open(path).close()


def test_versions_of_other_servers_are_not_kept(moved, path):
    server = made(fedbuff(buffer_size=1), moved, store=path)
    for put in [np.array, *libraries().values()]:
        foreign = made(fedbuff(buffer_size=1), put).pull()
        check_error(r"version 0 is not a version of this server", server.checkpoint, keep=[foreign])
    server.close()


def arrays(server):
    return {name: bits(array) for name, array in server.state_dict()["arrays"].items()}


@pytest.mark.skipif(emulated is None, reason="a GPU's memory is not run out of on purpose")
def test_out_of_memory_changes_nothing(kept, monkeypatch):
    """Whichever allocation fails: of a slot, a version, or a row here or there."""
    with on_host():
        here, there = made(ca2fl(buffer_size=M), np.array), made(ca2fl(buffer_size=M), libraries()["cupy"], **kept)
        cupy, failed = sys.modules["cupy"], 0

        def limited(make, rooms):
            def checked(*arguments):
                if not rooms:
                    raise MemoryError("out of memory")
                rooms.pop()
                return make(*arguments)

            return checked

        for _ in range(20):
            some_pushes(here, 1)
            for left in range(9):
                rooms, before, joins = [True] * left, arrays(there), there.joins
                with monkeypatch.context() as patch:
                    patch.setattr(cupy, "empty", limited(cupy.empty, rooms))
                    patch.setattr(cupy.cuda, "alloc_pinned_memory", limited(cupy.cuda.alloc_pinned_memory, rooms))
                    try:
                        some_pushes(there, 1)
                    except MemoryError:
                        failed += 1
                if there.joins > joins:
                    break
                assert arrays(there) == before
            assert arrays(there) == arrays(here)
        assert failed > 30
        assert there.version == here.version >= 4


def test_a_disk_that_is_full_when_a_round_is_kept(moved, path, monkeypatch):
    """The round stays, and is kept as soon as there is room; the last commit is what it was."""
    here, there = made(ca2fl(buffer_size=M), np.array), made(ca2fl(buffer_size=M), moved, store=path)
    for server in (here, there):
        in_turn(server, 2 * M - 1)
    write = Segments.write

    def full(segments, *arguments):
        if segments.folder.name in ("rows", "params", "sum"):
            raise StoreError("[store] cannot write: No space left on device")
        write(segments, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Segments, "write", full)
        check_error("No space left", in_turn, there, 1, error=StoreError)
        assert (there.version, index_of(there).committed().meta["version"]) == (1, 1)
    in_turn(here, 1)
    for server in (here, there):
        in_turn(server, M)
    same(here, there)
    there.close()
    same(Server.open(path), here)


def test_no_room_for_the_next_version_is_told_before_the_round_is_decided(moved, path, monkeypatch):
    there = made(ca2fl(buffer_size=M), moved, store=path)
    in_turn(there, 2 * M - 1)
    store_of(there).vectors._spare_draft = None
    before, more = arrays(there), store_of(there).vectors._params.allocate

    full = raising(StoreError, "[store] no space")
    store_of(there).vectors._versions._memory, held = full, store_of(there).vectors._versions.take()
    check_error("no space", in_turn, there, 1, error=StoreError)
    assert (there.joins, arrays(there)) == (2 * M - 1, before)
    store_of(there).vectors._versions._memory = more
    in_turn(there, 1)
    assert (there.version, held.size) == (2, D)


def test_what_is_refused(moved, path):
    rule, x = ca2fl(buffer_size=M), vector(0)
    for arguments, options, message in [
        ((rule, x), {}, r"rows_on is 'host', but params is on the CPU, and so are the rows"),
        ((rule, moved(x)), {"store": path}, "rows_on is 'host', but the rows are in the store"),
        ((fedbuff(), moved(x)), {}, "rows_on is 'host', but fedbuff caches no rows"),
    ]:
        check_error(rf"\[Server\] {message}", Server, *arguments, num_clients=CLIENTS, rows_on="host", **options)
    check_error("rows_on is 'disk', must be 'device'", Server, rule, moved(x), num_clients=CLIENTS, rows_on="disk")
    assert not (path).exists()


def test_what_is_planned(kept, moved):
    rule, store = ca2fl(buffer_size=M, codec="affine-4"), "store" in kept
    server = made(rule, moved, **kept)
    push_all(server, [*range(CLIENTS)] * 2, vector)
    found = plan(
        rule, D, num_clients=CLIENTS, gpu=True, store=store, rows_on=kept.get("rows_on", "device"), max_slots=9
    )
    row = rule.calibrate.codec.row_bytes(D)
    assert found.working["staged rows"].size == 9 * row
    assert [part.size for part in found.host.values()] == [row if store else CLIENTS * row]
    rows = CLIENTS * row  # of a store they are files
    assert sum(part.size for part in found.memory.values()) + rows == server.state_bytes
    if store:
        folders = {name: there.disk_bytes for name, there in store_of(server).vectors.arrays.items()}
        assert {name: found.disk[name].size for name in ("params", "rows", "sum")} == {
            name: folders[name] for name in ("params", "rows", "sum")
        }


def test_the_command_says_what_is_where():
    asked = ["plan", "--rule", "ca2fl", "--clients", "50", "--params", "1_000_000", "--rows-on"]
    told = invoke(*asked, "host", "--gpu", "--buffer", "4")
    lines = {tuple(line.split()[:2]) for line in told.stdout.splitlines()}
    assert ("pinned", "rows") in lines
    assert "staged rows" in told.stdout
    told = invoke(*asked, "disk")
    assert told.exit_code != 0
    assert "rows_on is 'disk'" in told.stderr


def test_a_budget_is_of_the_device(moved):
    rule, row = ca2fl(buffer_size=M), 4 * D
    least = plan(rule, D, num_clients=CLIENTS, gpu=True, rows_on="host", max_slots=M).memory_bytes
    assert least == row * (2 + M + M) + 8 * D
    check_error(r"memory_budget is .* staged rows 36 kB", made, rule, moved, rows_on="host", memory_budget=least - 1)
    server = made(rule, moved, rows_on="host", memory_budget=least + 4 * row)  # a slot and the row of who pushes
    assert (slots_limit(server), aggregator_of(server).plane.versions.max_versions) == (M + 2, 2)


def test_an_upload_is_there_when_it_was_waited_for(moved):
    """Its memory on the host is used again when it has arrived, and not before."""
    device = device_of("test", [moved(vector(0))], [])
    sent = [device.upload(vector(k), pinned=False) for k in range(20)]
    if emulated is not None:  # as late as may be
        assert not all(upload.done() for upload in sent)
    for k, upload in reversed([*enumerate(sent)]):
        upload.wait()
        assert upload.done()
        assert bits(to_numpy(upload.array)) == bits(vector(k))
    made_here = len(device._bounces)
    if emulated is not None:
        assert made_here > 1
    for k in range(20):
        upload = device.upload(vector(k), pinned=False)
        upload.wait()
    assert len(device._bounces) == made_here
