"""Forked children that use afflux work or raise within seconds; none hangs. Each case is a process of its own."""

import os
import textwrap

import pytest

from processes import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

HEAD = """
import multiprocessing, os, sys, threading, time
import numpy as np
from afflux import Server, UnavailableError, ops
from afflux.rules import ca2fl, fedbuff

d = 200_000  # more than one superblock, hence threads
server = Server(fedbuff(buffer_size=2), np.zeros(d, np.float32), num_threads=2)
one = np.ones(d, np.float32)
fork = multiprocessing.get_context("fork")

def rounds(server, count):
    for i in range(2 * count):
        server.push(client=i % 2, update=one, version=server.version)
    return server.version, float(server.params[7])

def refuses(text, *calls):
    for call in calls:
        try:
            call()
        except UnavailableError as error:
            assert text in str(error), error
        else:
            os._exit(1)

def amid_a_sweep(push):
    # A thread that pushes, held up before its sweep, and the event that lets it go on.
    reached, go, apply = threading.Event(), threading.Event(), ops.apply
    def slow(*args, **options):
        reached.set()
        go.wait(600)
        apply(*args, **options)
    ops.apply = slow
    pusher = threading.Thread(target=push)
    pusher.start()
    reached.wait(600)
    return pusher, go
"""


PUSH = "server.push(client=client, update=one, version=server.version, **options)"
#: A step reads the vectors where they are, and so does a mean without a server.
STEP = """
        server.step([(client, server.version, one), (client + 3, server.version, one.copy())])
        assert (aggregate([one, one.copy()], [1, client + 1], num_threads=2) == 1).all()
""".strip()


def run(code):
    """Run the code to its end, in a process of its own; it prints nothing."""
    done = run_python("-W", "ignore", "-c", textwrap.dedent(HEAD) + textwrap.dedent(code) + '\nprint("done")')
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "done\n"


def test_the_ids_of_tasks_differ():
    run("""
    def ids(count):
        return [server.checkout(client).id for client in range(count)]
    with fork.Pool(2) as pool:
        results = pool.map_async(ids, [10, 10], chunksize=1).get(1800)
    assert len({*results[0], *results[1], *ids(10)}) == 30
    """)


def test_a_pool_of_forked_workers():
    """Each child steps its own copy of a server that has worked before; the parent's stays as it was."""
    run("""
    assert rounds(server, 3) == (3, 3.0)
    def work(count):
        facts = ops.ingest(one, np.empty(d, np.float32), num_threads=2)
        assert facts.sum_of_squares == d
        ops.gram([one, one], num_threads=2)
        return rounds(server, count)
    with fork.Pool(2) as pool:
        results = pool.map_async(work, [1, 1, 1, 1], chunksize=1).get(1800)
    assert sorted(results)[0] == (4, 4.0), results
    assert rounds(server, 1) == (4, 4.0)
    """)


def test_children_of_children_end_as_processes_do():
    """The threads of each are its own, whether or not its parent has any."""
    run("""
    products = ops.gram([one, one[::-1].copy()], num_threads=2)
    def generation(left):
        assert (ops.gram([one, one[::-1].copy()], num_threads=3) == products).all()
        if left:
            child = os.fork()
            if child == 0:
                generation(left - 1)
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (ops.gram([one, one[::-1].copy()], num_threads=4) == products).all()
    for _ in range(5):
        generation(3)
    """)


def test_forked_data_loader_workers():
    pytest.importorskip("torch")
    run("""
    import torch
    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # torch's own threads are running
    rounds(server, 2)
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, i):
            pulled = server.pull()
            slot = torch.empty(d)
            ops.ingest(torch.full((d,), float(i)), slot, num_threads=2)
            version, value = rounds(server, 1)
            assert version == pulled.version + 1 and value == version, (version, value)
            return slot[:2]
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork", timeout=1800)
    seen = []
    for batch in loader:
        rounds(server, 1)
        seen.append(batch[0, 0].item())
    assert seen == list(range(8)), seen
    assert server.version == 10
    """)


def test_a_fork_amid_a_round_raises_in_the_child():
    run("""
    server.push(client=0, update=one, version=0)
    pusher, go = amid_a_sweep(lambda: server.push(client=1, update=one, version=0))
    child = os.fork()
    if child == 0:
        assert server.pull().version == 0  # reading is always possible
        assert server.counts["joined"] == 2
        push = lambda: server.push(client=2, update=one, version=0)
        text = "forked while another thread used the server"
        refuses(text, push, server.flush, server.state_dict, lambda: server.rows)
        os._exit(0)
    go.set()
    pusher.join(600)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server.version == 1 and rounds(server, 1)[0] == 2
    """)


@pytest.mark.parametrize(
    ("rule", "accumulate", "call"),
    [
        ("fedbuff(buffer_size=3)", False, PUSH),
        ("ca2fl(buffer_size=3)", False, PUSH),
        ("fedbuff(buffer_size=3)", True, PUSH),
        ("fadas(buffer_size=3)", False, STEP),
    ],
    ids=["fedbuff", "ca2fl", "accumulate", "step"],
)
def test_forks_while_threads_push(rule, accumulate, call):
    """Wherever the fork hits: the child works on a whole copy, or raises; and it ends."""
    run(
        f"""
    from afflux import aggregate
    from afflux.rules import fadas
    def push_once(client, **options):
        {call}
    server = Server({rule}, np.zeros(d, np.float32), num_clients=8, num_threads=2, max_slots=4,
                    accumulate={accumulate})
    stop = threading.Event()
    def push(client):
        while not stop.is_set():
            push_once(client)
    threads = [threading.Thread(target=push, args=(client,)) for client in range(3)]
    for thread in threads:
        thread.start()
    outcomes = set()
    for i in range(40):
        time.sleep(0.002 * (i % 7))
        child = os.fork()
        if child == 0:
            try:
                for client in range(6):
                    push_once(client, timeout=5)
                os._exit(10 if float(server.params[0]) == float(server.params[-1]) else 1)
            except UnavailableError:
                os._exit(11)
            finally:
                os._exit(2)
        deadline = time.monotonic() + 1800
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, "a child hangs"
            time.sleep(0.001)
        outcomes.add(os.waitstatus_to_exitcode(done[1]))
    stop.set()
    for thread in threads:
        thread.join(600)
    assert outcomes <= {{10, 11}}, outcomes
    # At rest the child's copy is whole, and all its threads may use it at once; counters and log can always be read.
    child = os.fork()
    if child == 0:
        failures = []
        def use(client):
            try:
                for _ in range(5):
                    push_once(client)
            except BaseException as error:
                failures.append(error)
        users = [threading.Thread(target=use, args=(client,)) for client in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join(600)
        os._exit(1 if failures or server.counts["refused"] else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    )


def test_a_fork_by_c_code_is_seen(tmp_path):
    """It runs none of Python's hooks."""
    run(f"""
        import ctypes
        stored = Server(fedbuff(buffer_size=1), np.zeros(3), store={str(tmp_path / "store")!r})
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            try:
                stored.push(client=0, update=np.ones(3), version=0)
            except UnavailableError as error:
                os._exit(0 if "this process was forked" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert stored.push(client=0, update=np.ones(3), version=0).version == 1
        stored.close()
        """)


@pytest.mark.parametrize("plane", ["None", "ShardedPlane(2)"])
def test_a_child_reads_the_versions_of_a_store_as_they_were_at_the_fork(plane, tmp_path):
    """The parent's later rounds reuse the pages of the file that both have mapped."""
    run(f"""
    from afflux.aggregation.sharded_plane import ShardedPlane
    server = Server(fedbuff(buffer_size=1), np.zeros(d, np.float32), store={str(tmp_path / "store")!r}, plane={plane})
    pulled, task = server.pull(), server.checkout("ann")
    rounds(server, 1)
    held = [pulled, server.pull()]
    begin, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begin, 1)
        out = np.empty(d, np.float32)
        assert (server.pull(out=out), server.version) == (2, 2)
        values = (held[0].params, task.params, task.tree(), held[1].params, server.params, out)
        assert [set(value.tolist()) for value in values] == 3 * [{{0.0}}] + 3 * [{{2.0}}]
        os._exit(0)
    del held, pulled
    task.cancel()
    assert rounds(server, 3) == (8, 8.0)
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)


@pytest.mark.parametrize("plane", ["None", "ShardedPlane(2)"])
def test_a_child_reads_no_rows_of_a_store_and_the_sum_as_it_was_at_the_fork(plane, tmp_path):
    run(f"""
    from afflux.aggregation.sharded_plane import ShardedPlane
    options = dict(store={str(tmp_path / "store")!r}, num_clients=4, plane={plane})
    server = Server(ca2fl(buffer_size=1), np.zeros(d, np.float32), **options)
    push = lambda value: server.push(client="ann", version=server.version, update=np.full(d, value, np.float32))
    push(1.0), push(2.0)
    rows = server.rows
    total = rows.sum
    begin, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begin, 1)
        assert set(rows.sum.tolist()) == set(total.tolist()) == {{2.0}}
        reads = lambda: rows.row("ann"), lambda: [*rows.values()], lambda: rows.client_ids, lambda: "ann" in rows
        refuses("forked", *reads)
        os._exit(0)
    for value in range(3, 9):
        push(float(value))
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rows.row("ann").tolist() == [8.0] * d
    """)


def test_a_child_without_memory_for_a_copy_raises_an_error(tmp_path):
    """In place of the end of the process by a signal, when it reads the pages."""
    run(f"""
    import resource
    d = 4_000_000
    server = Server(fedbuff(buffer_size=1), np.zeros(d, np.float32), store={str(tmp_path / "store")!r})
    task = server.checkout("ann")
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + d, -1))
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        reads = server.pull, lambda: server.pull(out=np.empty(d, np.float32)), lambda: task.params, task.tree
        refuses("forked", *reads)
        own = Server(fedbuff(buffer_size=1), np.zeros(4, np.float32))
        own.push(client=1, version=0, update=np.ones(4, np.float32))
        os._exit(0 if own.params.tolist() == [1.0] * 4 else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
