"""Pushes that only join take a way without Python's frames: it decides as the general way does, in every respect."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import AffluxError, Layout, Server
from afflux.aggregation.admission import Admission
from afflux.aggregation.reports import Closed, Join, Opened, Receipt
from afflux.rules import ca2fl, fedasync, fedbuff, mf_ca2fl, wkafl
from afflux.server.pending_push import Ticket
from afflux.server.tasks import TaskBook
from inside import aggregator_of, decide_elsewhere, monitor_of, mutex_of, slots_taken, without_fast_path

D = 5
FLOAT16 = np.array([1, 2, 3, 4, 5], np.float16)
VECTORS = [
    np.arange(D, dtype=np.float32),
    np.linspace(-1, 1, D),
    np.zeros(D, np.float32),
    FLOAT16,
    FLOAT16.astype(">f4"),
    np.ones(2 * D, np.float32)[::2],
    np.frombuffer(b"\0" * (4 * D + 1), np.uint8)[1:].view(np.float32),
    np.ones(D + 1, np.float32),
    np.ones((D, 1), np.float32),
    np.ones(D, np.int32),
    np.array([1, 2, np.nan, 4, 5], np.float32),
    np.array([1, np.inf, 3, 4, 5]),
    np.full(D, 1e20, np.float32),
    np.full(D, 1e300),
    np.ma.masked_array(np.ones(D, np.float32), [True] + [False] * 4),
    [1.0] * D,
    {"w": np.ones(D, np.float32)},
    None,
]
CLIENTS = [
    0,
    1,
    2,
    "i" * 1024,
    "i" * 1025,
    "é" * 512,
    "é" * 513,
    -1,
    "a",
    "b",
    "é",
    "\ud800",
    2**63,
    2**64,
    -(2**63),
    True,
    1.0,
    1.5,
    np.int64(2),
    None,
]
PUSHES = st.fixed_dictionaries(
    {
        "client": st.sampled_from([*range(8), "a", "b"] * 4 + CLIENTS),
        "version": st.sampled_from([0, 0, 1, 1, 2, "newest"] * 3 + [-1, 99, 0.0, True, 2**80, None]),
        "vector": st.sampled_from([*VECTORS[:3]] * 9 + VECTORS),
        "num_examples": st.sampled_from([1, 7] * 8 + [0, -1, 2.0, 2**63, True, "1"]),
        "loss": st.sampled_from([None, 0.5] * 6 + [float("nan"), 1, np.float32(2), "x"]),
        "also": st.sampled_from([{}] * 9 + [{"update": VECTORS[0]}, {"model": VECTORS[0]}, {"client_lr": 0.1}]),
        "task": st.sampled_from([None] * 6 + [0, 0, 1, 5, "closed"]),  # its place among the open ones
    }
)
OTHERS = st.sampled_from(["flush"] * 5 + ["checkout"] * 8 + ["discard", "load"])
CALLS = st.lists(st.one_of([PUSHES] * 4 + [OTHERS]), max_size=40)
RULES = {
    "update": fedbuff(buffer_size=3),
    "model": fedasync(),
    "gradient": wkafl(buffer_size=3),
    "rows": ca2fl(buffer_size=2),
    "encoded": mf_ca2fl(buffer_size=4, bits=4),
}


def made(name, fast, options):
    rule = RULES[name]
    clients = {"num_clients": 6} if rule.calibrate.cached else {}
    server = Server(rule, np.zeros(D, np.float32), log=True, **clients, **options)
    if not fast:
        without_fast_path(server)
    return server


def outcome(call):
    """What a call gives, or raises, as plain data."""
    try:
        receipt = call()
    except Exception as error:
        return type(error), str(error)
    reports = [report for report in (receipt.report, *receipt.more) if report is not None]
    plain = [(r.version, r.client_ids, r.joins.tolist(), r.weights.tolist(), r.norms.tolist()) for r in reports]
    return *receipt._replace(report=None, more=()), plain


def push(server, given):
    wanted = {server.rule.kind: given["vector"]}
    facts = {name: given[name] for name in ("num_examples", "loss")}
    if given["task"] is None:
        version = server.version if given["version"] == "newest" else given["version"]
        facts |= {"client": given["client"], "version": version}
    elif given["task"] == "closed" or given["task"] >= len(server.tasks):
        facts["task"] = "closed"
    else:
        facts["task"] = server.tasks[given["task"]]
    return outcome(lambda: server.push(**facts, **(given["also"] | wanted)))


def checkout(server):
    joined = server.counts["joined"]
    server.checkout(joined % 7, lease=1000 if joined % 2 else None)


def facts(server):
    state = aggregator_of(server).admission.state
    waiting = [arrival._replace(slot=np.asarray(arrival.slot).tolist()) for arrival in state.arrivals()]
    return (
        waiting,
        state.filled,
        server.version,
        server.params.tobytes(),
        server.joins,
        server.counts,
        repr([entry for entry in server.log if isinstance(entry, Join)]),
        aggregator_of(server).admission._places,
        slots_taken(server),
        [repr(fault) for fault in server.faults],
        *events(server),
    )


def events(server):
    """What tasks have left in the log, among the events that a store keeps, and as the last one closed.

    Ids are random: a task is named by its place among those that the server has opened.
    """
    log = [entry for entry in server.log if isinstance(entry, Opened | Closed)]
    places = {None: None}
    for entry in log:
        places.setdefault(entry.task, len(places))
    state = aggregator_of(server).admission.state
    kept = aggregator_of(server).admission.growing_task_events[: state.task_events]
    return (
        [
            [(type(entry), places.get(entry.task), getattr(entry, "why", None)) for entry in each]
            for each in (log, kept)
        ],
        places.get(state.closed_task),
        [task.client for task in server.tasks],
        list(aggregator_of(server).tasks.bases()),
    )


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(list(RULES)),
    duplicates=st.sampled_from(["latest", "reject", "both"]),
    max_staleness=st.sampled_from([None, 0, 1]),
    faults=st.sampled_from(["raise", "record"]),
    max_abs=st.sampled_from([None, 3.0]),
    calls=CALLS,
)
def test_it_decides_as_the_general_way(name, calls, **options):
    fast, general = made(name, True, options), made(name, False, options)
    assert aggregator_of(fast).fast is not None
    states = [(server, server.state_dict()) for server in (fast, general)]
    for call in calls:
        if call == "load":
            for server, state in states:
                server.load_state_dict(state)
        elif isinstance(call, str):
            for server in (fast, general):
                checkout(server) if call == "checkout" else getattr(server, call)()
        else:
            assert push(fast, call) == push(general, call)
        assert repr(facts(fast)) == repr(facts(general))


class Counted:
    """Counts what the fast way gives."""

    def __init__(self, fast):
        self.fast, self.given, self.joined = fast, [], []

    def push(self, *arguments):
        self.given.append(self.fast.push(*arguments))
        return self.given[-1]

    def join(self, *arguments):
        self.joined.append(self.fast.join(*arguments))
        return self.joined[-1]


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_which_pushes_take_it(name, dtype):
    """All that only join; the vector of one that completes a round is not read twice."""
    server = made(name, True, {})
    counted = aggregator_of(server).fast = Counted(aggregator_of(server).fast)
    size = server.rule.buffer_size
    for client in range(size):
        server.push(client=client, version=0, **{server.rule.kind: np.ones(D, dtype)})
    kinds = [type(given).__name__ for given in counted.given]
    assert kinds == ["Receipt"] * (size - 1) + ["tuple"]
    assert server.version == 1


def test_trees_take_it_and_models_with_buffers_do_not():
    layout = {"w": np.zeros(D, np.float32)}
    server = Server(fedbuff(buffer_size=9), layout)
    counted = aggregator_of(server).fast = Counted(aggregator_of(server).fast)
    server.push(client=1, version=0, update=np.ones(D, np.float32))
    server.push(client=2, version=0, update={"w": np.ones(D, np.float32)})
    assert [type(given).__name__ for given in counted.given] == ["Receipt", "NoneType"]
    torch = pytest.importorskip("torch")
    with_buffers = Server(fedbuff(buffer_size=9), torch.nn.BatchNorm1d(D))
    assert Layout.of(torch.nn.BatchNorm1d(D)).buffers
    with pytest.raises(AffluxError, match="lacks the model's buffers"):
        with_buffers.push(client=1, version=0, update=np.ones(2 * D, np.float32))


@pytest.mark.parametrize("kind", ["update", "model"])
def test_pushes_of_tasks_join_by_it(kind):
    """Of a converted model, too; but not the one that completes a round."""
    server = made("update", True, {})
    counted = aggregator_of(server).fast = Counted(aggregator_of(server).fast)
    for client in range(3):
        receipt = server.push(task=server.checkout(client), **{kind: np.ones(D, np.float32)})
    assert [type(given).__name__ for given in counted.joined] == ["Receipt", "Receipt", "NoneType"]
    assert (receipt.status, server.version, server.tasks) == ("joined", 1, ())


def test_a_task_that_closes_before_its_push_joins_is_left_to_the_general_way():
    server = made("update", True, {})
    task = server.checkout(7)
    found = aggregator_of(server).tasks.find(task.id)
    pushed = (7, 0, 1, 0.5, 1.0, aggregator_of(server).take_slot(0), None, (0.0, 1.0), 0, ())
    task.cancel()
    ticket = Ticket(task=found)
    assert aggregator_of(server).fast.join(aggregator_of(server), pushed, ticket) is None
    assert ticket.decision is None
    assert server.arrivals_waiting == 0


@pytest.mark.parametrize("of_task", [False, True])
@pytest.mark.parametrize("way", ["fast", "general"])
def test_the_ticket_of_a_push_gets_the_decision(way, of_task):
    server = made("update", True, {})
    aggregator = aggregator_of(server)
    ticket = Ticket(task=aggregator.tasks.find(server.checkout(7).id) if of_task else None)
    pushed = (7, 0, 1, 0.5, 1.0, aggregator.take_slot(0), None, (0.0, 1.0), 0, ())
    receipt = aggregator.fast.join(aggregator, pushed, ticket) if way == "fast" else aggregator.join(pushed, ticket)
    assert (receipt.status, ticket.decision) == ("joined", ("joined", 0, 0, None, None))


def test_an_interrupt_before_the_task_is_closed_in_the_book_changes_nothing_else(monkeypatch):
    """The state says that it is closed: the book follows."""
    server = made("update", True, {})
    task = server.checkout(7)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TaskBook, "close", interrupted)
        server.push(task=task, update=VECTORS[0])
    assert (server.arrivals_waiting, server.counts["joined"], server.tasks) == (1, 1, ())
    assert server.push(task=task, update=VECTORS[0]).status == "expired"
    assert not mutex_of(server).locked()


def test_it_joins_nothing_while_another_thread_decides():
    server = made("update", True, {})
    monitor = monitor_of(server)
    pushed = (7, 0, 1, 0.5, 1.0, aggregator_of(server).take_slot(0), None, (0.0, 1.0), 0, ())
    with mutex_of(server):
        assert aggregator_of(server).fast.join(aggregator_of(server), pushed, None) is None
    decide_elsewhere(server, True)
    assert aggregator_of(server).fast.join(aggregator_of(server), pushed, None) is None
    decide_elsewhere(server, False)
    assert aggregator_of(server).fast.join(aggregator_of(server), pushed, None).status == "joined"
    assert not mutex_of(server).locked()
    assert monitor.owner is None


@pytest.mark.parametrize(("attribute", "value"), [("closed", True), ("failure", "a step has failed")])
def test_it_joins_nothing_once_the_server_takes_nothing(attribute, value):
    server = made("update", True, {})
    pushed = (7, 0, 1, 0.5, 1.0, aggregator_of(server).take_slot(0), None, (0.0, 1.0), 0, ())
    setattr(aggregator_of(server), attribute, value)
    assert aggregator_of(server).fast.join(aggregator_of(server), pushed, None) is None
    assert aggregator_of(server).fast.push(aggregator_of(server), 7, 0, VECTORS[0], None, None, 1, None) is None
    assert aggregator_of(server).admission.state.filled == 0


def test_an_arrival_of_a_version_that_a_load_took_back_is_left_to_the_general_way():
    server = made("update", True, {})
    pushed = (7, 1, 1, 0.5, 1.0, aggregator_of(server).take_slot(0), None, (0.0, 1.0), 0, ())
    assert aggregator_of(server).fast.join(aggregator_of(server), pushed, None) is None


def test_threads():
    """Every push joins once, whichever way it takes."""
    server = Server(fedbuff(buffer_size=7), np.zeros(6000, np.float32), log=True, duplicates="both")
    each = 300

    def work(client):
        for _ in range(each):
            server.push(client=client, version=server.version, update=np.ones(6000, np.float32))

    threads = [threading.Thread(target=work, args=(client,)) for client in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (server.joins, server.version) == (4 * each, 4 * each // 7)
    assert [entry.number for entry in server.log] == list(range(4 * each))
    assert slots_taken(server) == server.arrivals_waiting == 4 * each % 7


def test_wrong_calls_of_the_extension_raise():
    server = made("update", True, {})
    fast = aggregator_of(server).fast
    with pytest.raises(TypeError, match="takes 3 arguments, 0 were given"):
        fast.join()
    with pytest.raises(TypeError, match="no tuple of the facts"):
        fast.join(aggregator_of(server), (1, 2), None)
    with pytest.raises(AttributeError):
        fast.join(None, (1,) * 8, None)


def test_it_holds_nothing_of_the_server():
    """Else a server could not be freed: the extension takes no part in the search for cycles."""
    import gc
    import weakref

    server = made("update", True, {})
    server.push(client=1, version=0, update=np.ones(D, np.float32))
    gone = weakref.ref(aggregator_of(server).admission)
    del server
    gc.collect()
    assert gone() is None


def test_receipts_hash_as_those_that_python_makes():
    server = made("update", True, {})
    receipt = server.push(client=1, version=0, update=VECTORS[0])
    (entry,) = server.log
    assert receipt.report is None
    assert (hash(receipt), hash(entry)) == (hash(Receipt(*receipt)), hash(Join(*entry)))


def test_an_exception_of_a_signal_handler_is_raised(monkeypatch):
    """One that comes while a client is compared with num_clients."""
    server = made("rows", True, {})

    def interrupted(*_):
        raise TimeoutError("the caller's deadline")

    monkeypatch.setattr(Admission, "_check_clients", interrupted)
    with pytest.raises(TimeoutError, match="deadline"):
        server.push(client=1, version=0, update=VECTORS[0])
    assert (server.joins, slots_taken(server)) == (0, 0)


def test_a_server_that_fails_after_a_vector_was_taken_in_counts_a_refusal():
    server = made("update", True, {})
    aggregator = aggregator_of(server)

    class Fails(Counted):
        def push(self, *arguments):
            decide_elsewhere(server, True)  # so that it does not join at once
            pushed = super().push(*arguments)
            decide_elsewhere(server, False)
            aggregator.failure = "a step has failed"
            return pushed

    aggregator.fast = Fails(aggregator.fast)
    with pytest.raises(AffluxError, match=r"\[push\] a step has failed"):
        server.push(client=1, version=0, update=VECTORS[0])
    assert (server.joins, server.counts["refused"]) == (0, 1)
