"""What all adapters share, without a framework: settings, files of NumPy, clients, replies, the loop, resuming."""

import io
import logging
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from afflux import AffluxError, Server
from afflux.integrations._core import Trained, TrainingRun
from afflux.integrations._loop import Loop, Reply, Transport
from afflux.integrations._npy import array_of, bytes_of
from afflux.integrations._reading import bounded
from afflux.integrations._server import weighs_by_examples
from afflux.integrations._settings import RunSettings, require_absolute_store
from afflux.integrations._versions import OncePerVersion
from afflux.rules import afa_cs, ca2fl, fedasync, fedavg, fedbuff, gsgm, mf_ca2fl
from afflux.rules.rule import Needs

MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def trained(value=1.0, **facts):
    return Trained({name: array + np.float32(value) for name, array in MODEL.items()}, **facts)


def run_of(rule=None, num_clients=4, key=None, clock=None, **settings):
    made = RunSettings(**settings)
    clock = {} if clock is None else {"clock": clock}
    return TrainingRun(rule or fedbuff(buffer_size=2), MODEL, made, num_clients=num_clients, key=key, **clock)


# Settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0, must be an int of at least 1"),
        ({"timeout": -1}, "timeout is -1, must be finite and positive"),
        ({"max_failures": 1.5}, "max_failures is 1.5"),
        ({"store": 3}, "store is 3, must be a folder's path"),
        ({"server_options": {"max_stalenes": 3}}, "server_options: .*did you mean 'max_staleness'"),
        ({"server_options": {"faults": "raise"}}, 'faults="raise" would end the run for one client'),
        ({"server_options": {"inplace": True}}, "inplace=True overwrites the version"),
        ({"server_options": [("log", True)]}, "must be a dict"),
    ],
)
def test_settings_are_checked(wrong, message):
    with pytest.raises(AffluxError, match=rf"\[settings\].*{message}"):
        RunSettings(**wrong)


def test_a_relative_store_is_refused_where_the_folder_may_change(tmp_path):
    for store in (None, tmp_path / "store"):
        require_absolute_store("run", RunSettings(store=store), "it runs elsewhere")
    with pytest.raises(AffluxError, match=r"\[run\] store is 'runs/1', must be an absolute path: it runs elsewhere"):
        require_absolute_store("run", RunSettings(store="runs/1"), "it runs elsewhere")


def test_a_stored_server_that_raises_for_faults_is_refused(tmp_path):
    Server(fedbuff(buffer_size=2), MODEL, store=tmp_path / "store").close()
    with pytest.raises(AffluxError, match='faults="raise"'):
        run_of(store=tmp_path / "store")
    Server.open(tmp_path / "store").close()  # it is not locked


# NumPy's files


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "|b1", "<i8", "|u1", "<c8"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (2, 0, 5), (1,) * 30])
@pytest.mark.parametrize("order", ["C", "F"])
def test_files_of_numpy_are_read(dtype, shape, order):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype, order=order)
    found = array_of(saved(array))
    assert found.dtype == array.dtype
    assert found.shape == shape
    assert found.tobytes() == array.tobytes()
    again = array_of(bytes_of(array))
    assert (again.shape, again.dtype, again.tobytes()) == (shape, array.dtype, array.tobytes())


def file_with(header, elements=b"", version=1):
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(width, "little") + header + elements


FLOAT = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00",
        file_with(b"-" * 9000),
        file_with(b"-" * 1900),
        file_with(b"(" * 1900),
        file_with(b"-" * 9000, version=2),
        file_with(FLOAT % b"3,", bytes(8)),
        file_with(FLOAT % b"3,", bytes(16)),
        file_with(FLOAT % (b"9" * 19 + b",") * 60),
        file_with(FLOAT % (b"0, " + b"9" * 19)),
        file_with(FLOAT % b"1, " * 65),
        file_with(FLOAT % b"-3,", bytes(12)),
        file_with(FLOAT % b"3,", bytes(12), version=4),
        file_with(FLOAT.replace(b"<f4", b"|O") % b"1,", bytes(8)),
        file_with(FLOAT.replace(b"<f4", b"|V0") % b"1,"),
        file_with(FLOAT.replace(b"<f4", b"\xff\xfe") % b"1,"),
        file_with(FLOAT.replace(b"'<f4'", b"[('a', '<f4')]") % b"1,", bytes(4)),
        file_with(FLOAT.replace(b"'<f4'", b"__import__('os')") % b"1,", bytes(4)),
        saved(np.array(["a"], object), allow_pickle=True),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
    ],
)
def test_made_up_files_are_refused_at_once(data):
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, TypeError, OverflowError)):
            array_of(data)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_random_bytes_are_refused_or_read():
    rng = random.Random(0)
    good = saved(np.arange(12.0, dtype=np.float32).reshape(3, 4))
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            array_of(bytes(data))
        except (ValueError, TypeError, OverflowError):
            continue


# Replies


class OutOfMemory:
    """Arrays whose reading raises what Python's parser does for a made-up header."""

    def __init__(self, error):
        self.error = error

    def __call__(self):
        raise self.error


@pytest.mark.parametrize(
    "error", [MemoryError("s_push: parser stack overflow"), RecursionError("too deep"), OSError("no file"), KeyError(1)]
)
def test_whatever_the_bytes_of_a_client_raise_is_its_fault(error):
    run = run_of()
    run.sent("a", run.assign("ann"))
    receipt = run.receive("a", OutOfMemory(error))
    assert receipt.status == "faulty"
    assert type(error).__name__ in receipt.reason
    assert run.server.faults[0].client_id == "ann"
    assert run.server.tasks == ()


class Raises(np.ndarray):
    """An array whose shape raises, outside of what the server takes for the client's fault."""

    @property
    def shape(self):
        raise MemoryError("made up")


class RaisingMapping(dict):
    def keys(self):
        raise MemoryError("made up")

    __iter__ = __len__ = items = keys


class NoText(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


def of_subclass():
    return Trained({**MODEL, "w": MODEL["w"].view(Raises)})


def of_a_mapping():
    return Trained(RaisingMapping(MODEL))


@pytest.mark.parametrize("read", [of_subclass, of_a_mapping, OutOfMemory(NoText())])
def test_an_error_of_a_reply_itself_is_the_clients_fault(read):
    run = run_of()
    run.sent("a", run.assign("ann"))
    assert run.receive("a", read).status == "faulty"
    assert run.server.tasks == ()


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"), [("int32", 1e11), ("bool", 5.0), ("uint8", -3.0), ("int64", 1e19), ("float16", 1e10)]
)
def test_values_that_the_models_dtype_cannot_hold_are_refused(dtype, value, delta):
    model = {"w": np.zeros(3, np.float32), "n": np.zeros(2, dtype), "scalar": np.zeros((), "int16")}
    run = TrainingRun(fedbuff(buffer_size=2), model, RunSettings(), num_clients=4)
    for client, n, status in ((1, value, "faulty"), (2, 1.0, "joined"), (3, 1.0, "joined")):
        run.sent("a", run.assign(client))
        arrays = {**model, "n": np.full(2, n)}
        assert run.receive("a", lambda arrays=arrays: Trained(arrays, delta=delta)).status == status
    made = run.versions.of(run.server.pull())
    assert made["n"].dtype == dtype
    assert made["n"].tolist() == [1, 1]


def test_a_store_with_values_that_a_dtype_cannot_hold_opens(tmp_path):
    model = {"w": np.zeros(3, np.float16), "n": np.zeros(2, np.int32)}
    server = Server(fedbuff(buffer_size=1), model, store=tmp_path / "store", faults="record")
    server.push(client=1, version=server.pull(), model={"w": np.full(3, -1e10), "n": np.full(2, 1e11)})
    server.close()
    run = TrainingRun(fedbuff(buffer_size=1), model, RunSettings(store=tmp_path / "store"), num_clients=4)
    made = run.versions.of(run.server.pull())
    assert made["w"].tolist() == [-65504.0] * 3
    assert made["n"].tolist() == [2**31 - 1] * 2
    run.close()


@pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), {"a": {"w": np.zeros(3, np.float32)}}, 3, None])
def test_a_model_that_is_no_arrays_by_name_leaves_no_store(tmp_path, wrong):
    with pytest.raises(AffluxError):
        TrainingRun(fedbuff(buffer_size=2), wrong, RunSettings(store=tmp_path / "store"), num_clients=2)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("facts", [{"client_lr": 0.0}, {"client_lr": "a"}, {"local_steps": -1}])
def test_rates_that_the_rule_does_not_need_are_not_read(facts):
    for rule, status in ((fedbuff(buffer_size=2), "joined"), (gsgm(buffer_size=2), "faulty")):
        run = run_of(rule, client_lr=0.1, local_steps=1)
        run.sent("a", run.assign(1))
        assert run.receive("a", lambda: trained(**facts)).status == status


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("key", "rule"), [(None, fedbuff), ("said", fedbuff), (None, fedasync), ("said", fedasync)])
def test_a_slow_client_does_not_fail(key, rule, delta):
    """Its version is given up by max_staleness."""
    model = {**MODEL, "n": np.zeros((), np.int64)}
    made = RunSettings(server_options={"max_staleness": 1})
    options = {} if rule is fedasync else {"buffer_size": 1}
    run = TrainingRun(rule(**options), model, made, num_clients=4, key=key)
    run.clients.are([1, 77])
    run.sent("slow", run.assign(77), 77)
    for _ in range(4):
        run.sent("a", run.assign(1), 1)
        reply = Trained({name: array + 1 for name, array in model.items()}, client="ann", delta=delta)
        assert run.receive("a", lambda reply=reply: reply).status == "joined"
    slow = Trained(model, client="slow", delta=delta)
    assert run.receive("slow", lambda: slow).status in ("expired", "dropped")
    assert run.server.tasks == ()
    assert run.server.version == 4
    assert 77 in run.choose()


def test_a_reply_without_examples_is_faulty_where_the_rule_weighs_by_them():
    for rule, weighs in ((fedavg(buffer_size=1), True), (fedbuff(buffer_size=1), False), (ca2fl(buffer_size=1), False)):
        assert weighs_by_examples(rule) is weighs
        run = run_of(rule)
        run.sent("a", run.assign(1))
        receipt = run.receive("a", trained)
        assert receipt.status == ("faulty" if weighs else "joined")
        assert ("lacks its number of examples" in receipt.reason) is weighs


def test_a_rule_of_ones_own_says_that_it_weighs_by_examples():
    def weigh(arrivals):
        return arrivals.num_examples / 10

    rule = replace(fedavg(buffer_size=1), weigh=weigh)
    assert not weighs_by_examples(rule)  # nothing says so
    weigh.needs = Needs(examples=True)
    assert weighs_by_examples(rule)


def test_a_task_that_cannot_be_sent_is_closed():
    run = run_of(clock=(clock := Clock()))
    run.clients.are([1])
    run.sent(None, run.assign(1), 1)
    assert run.server.tasks == ()
    assert run.lost["failed"] == 1
    assert run.choose() == []  # it rests
    clock.now = 0.6
    assert run.choose() == [1]


def test_a_client_that_fails_rests_for_longer_each_time():
    run = run_of(clock=(clock := Clock()), retry_after=1.0, max_failures=3)
    run.clients.are([1, 2])
    for rest in (1, 2, 4, 8):
        run.sent("a", run.assign(1), 1)
        run.fail("a", "out of memory")
        assert run.choose() == [2]
        clock.now += rest - 0.1
        assert run.choose() == [2]
        clock.now += 0.2
        assert sorted(run.choose()) == [1, 2]
        run.clients.require_some_of_use()  # 2 has not failed
    run.sent("a", run.assign(1), 1)
    assert run.receive("a", trained).status == "joined"
    run.sent("a", run.assign(1), 1)
    run.fail("a")
    clock.now += 1.1
    assert sorted(run.choose()) == [1, 2]  # the first failure after one that was of use
    for _ in range(3):
        for address in (1, 2):
            run.sent("a", run.assign(address), address)
            run.fail("a", "out of memory")
    with pytest.raises(
        RuntimeError, match=r"none of 2 clients is of use: .* 3 times in a row or more, .*out of memory"
    ):
        run.clients.require_some_of_use()
    run.clients.are([1, 2, 3])
    run.clients.require_some_of_use()


def test_a_client_that_never_replies_holds_a_place_for_a_small_part_of_the_time():
    run = run_of(clock=(clock := Clock()), num_clients=2, concurrency=1, timeout=10.0)
    run.clients.are(["dead", "good"])
    held = {"dead": 0, "good": 0}
    while clock.now < 3000:
        for address in run.choose():
            run.sent(address, run.assign(address), address)
        for key in run.keys:
            held[key] += 1
            if key == "good":
                run.receive(key, trained)
        clock.now += 1
        run.expire()
    assert held["dead"] < 0.05 * held["good"]
    assert 3 <= run.lost["overdue"] <= 9


def test_more_than_64_clients_at_the_same_time_lose_no_version():
    """Each of them trains from a version of its own."""
    run = run_of(fedasync(), num_clients=100)
    for client in range(100):
        run.sent(str(client), run.assign(client), client)
        run.sent("next", run.assign("other"), "other")
        assert run.receive("next", trained).status == "joined"
    assert run.server.versions_held >= 100
    statuses = {run.receive(str(client), trained).status for client in range(100)}
    assert statuses == {"joined"}


def test_open_tasks_and_versions_stay_bounded():
    """10,000 replies in any order; some never come, some clients leave, some replies cannot be read."""
    rng, clock = random.Random(0), Clock()
    run = run_of(fedbuff(buffer_size=3), num_clients=100, concurrency=20, timeout=50.0, clock=clock)
    run.clients.are(range(100))
    silent, came, tasks, versions = set(), 0, 0, 0
    for number in range(10**7):
        for address in run.choose():
            number += 1
            key = None if rng.random() < 0.01 else f"{address}-{number}-{clock.now}"
            run.sent(key, run.assign(address), address)
            if key is not None and rng.random() < 0.01:
                silent.add(key)
        for key in rng.sample(run.keys, min(5, len(run.keys))):
            if key not in silent:
                came += 1
                bad = rng.random() < 0.01
                run.receive(key, OutOfMemory(MemoryError()) if bad else trained)
        clock.now += 1
        run.expire()
        tasks = max(tasks, len(run.server.tasks))
        versions = max(versions, run.server.versions_held)
        if came >= 10_000:
            break
    assert run.server.counts["faulty"] > 50
    assert run.lost["overdue"] > 20
    assert run.lost["failed"] > 50
    assert tasks <= 20
    assert versions <= 20 + 3


# Ids of clients

ROWS = [
    lambda: ca2fl(buffer_size=2),
    lambda: mf_ca2fl(buffer_size=2),
    lambda: afa_cs(buffer_size=2),
]


def one_round(run, addresses, **facts):
    for address in addresses:
        run.sent(str(address), run.assign(address), address)
    return [run.receive(str(address), lambda a=address: trained(client=facts.get(str(a)))) for address in addresses]


@pytest.mark.parametrize("rule", ROWS)
def test_a_store_with_rows_needs_clients_that_it_knows(tmp_path, rule):
    store = tmp_path / "store"
    rates = {"client_lr": 0.1, "local_steps": 1}
    run = run_of(rule(), store=store, **rates)
    one_round(run, [11, 12])
    run.close({})
    again = run_of(rule(), store=store, **rates)
    again.clients.are([21, 22])
    with pytest.raises(AffluxError, match=r"keeps something for 2 clients .* none of the 2 .* and with client_key="):
        again.clients.require_known()
    again.clients.are([21, 12])
    again.clients.require_known()
    again.close()
    named = run_of(rule(), store=store, **rates, key=lambda address: address - 10)
    named.clients.are([21, 22])
    named.clients.require_known()
    assert one_round(named, [21, 22])[1].status == "joined"
    assert sorted(named.server.rows.client_ids) == [11, 12]


def test_a_store_with_rows_is_not_resumed_with_the_names_in_replies(tmp_path):
    """Nothing would tell which of the stored rows is whose."""
    store = tmp_path / "store"
    run = run_of(ca2fl(buffer_size=2), store=store)
    one_round(run, [11, 12])
    run.close({})
    run = run_of(ca2fl(buffer_size=2), store=store, key="name")
    message = r"its address \(client_key=None\) .* and this run has client_key='name': give"
    with pytest.raises(AffluxError, match=message):
        run.resume(dict)  # closes the store
    for key in (lambda address: address, None):  # the ids themselves are compared
        run = run_of(ca2fl(buffer_size=2), store=store, key=key)
        run.resume(dict)
        run.close({})
    named = tmp_path / "named"
    for key, refused in (("name", False), ("name", False), ("other", True)):
        run = run_of(ca2fl(buffer_size=2), store=named, key=key)
        if refused:
            with pytest.raises(AffluxError, match=r"with client_key='name' .* and this run has client_key='other'"):
                run.resume(dict)
        else:
            run.resume(dict)
            one_round(run, [11, 12], **{"11": "ann", "12": "bob"})
            run.close({})
    Server.open(named).close()


def test_replies_say_their_clients():
    run = run_of(ca2fl(buffer_size=2), num_clients=3, key="said", server_options={"log": True})
    run.clients.are([101, 102, 103])
    receipts = one_round(run, [101, 102, 103], **{"101": "ann", "102": "bob", "103": "ann"})
    assert [receipt.status for receipt in receipts] == ["joined", "joined", "faulty"]
    assert "another client that is there is 'ann'" in receipts[2].reason
    assert sorted(run.server.rows.client_ids) == ["ann", "bob"]
    assert run.server.tasks == ()
    (changed,) = one_round(run, [101], **{"101": "bob"})
    assert "has said that it is 'ann', and now 'bob'" in changed.reason
    for wrong in (None, 1.5, [1], 2**64, "\udcff"):
        assert one_round(run, [103], **{"103": wrong})[0].status == "faulty"
    run.clients.are([104, 102, 103])  # the client comes back under another address
    assert one_round(run, [104], **{"104": "ann"})[0].status == "joined"
    assert sorted(run.server.rows.client_ids) == ["ann", "bob"]


def test_a_faulty_reply_takes_no_id():
    run = run_of(key="said")
    run.clients.are([1, 2])
    run.sent("a", run.assign(1), 1)
    assert run.receive("a", lambda: Trained({}, client="victim")).status == "faulty"
    run.sent("b", run.assign(2), 2)
    assert run.receive("b", lambda: trained(client="victim")).status == "joined"


def test_ids_of_clients_that_have_gone_are_forgotten():
    run = run_of(key=lambda address: address)
    for address in range(50):
        run.clients.are([address])
        run.clients.id_of(address)
    assert len(run.clients._ids) == 1


def test_a_reply_that_says_its_client_is_converted_from_the_version_of_its_task():
    run = run_of(fedasync(alpha=0.5), key="said")
    run.sent("a", run.assign(1), 1)
    run.sent("b", run.assign(2), 2)
    run.receive("b", lambda: trained(2.0, client="bob"))
    receipt = run.receive("a", lambda: trained(2.0, client="ann"))
    assert receipt.staleness == 1
    assert run.server.tasks == ()


@pytest.mark.parametrize("key", [None, "said"])
def test_clients_beyond_num_clients_get_no_task_and_no_row(key):
    run = run_of(ca2fl(buffer_size=1), num_clients=2, key=key, concurrency=9)
    names = {str(address): f"client {address}" for address in range(5)} if key else {}
    one_round(run, [0, 1], **names)
    run.clients.are(range(5))
    if key is None:
        assert sorted(run.choose()) == [0, 1]
    beyond = one_round(run, [2], **names)[0]
    assert beyond.status == "faulty"
    assert "would be client 3 of num_clients=2" in beyond.reason
    assert len(run.server.rows) == 2


def test_a_rule_of_passes_needs_clients_that_it_knows(tmp_path):
    rule = gsgm(buffer_size=2)
    rates = {"client_lr": 0.1, "local_steps": 1}
    run = run_of(rule, store=tmp_path / "store", num_clients=4, **rates)
    one_round(run, [1, 2])
    run.close({})
    again = run_of(rule, store=tmp_path / "store", num_clients=4, **rates)
    again.clients.are([7, 8, 9])
    with pytest.raises(AffluxError, match=r"keeps something for \d clients"):
        again.clients.require_known()
    again.close()


# Metrics


def test_metrics_are_bounded():
    many = {f"k{i}": float(i) for i in range(200)}
    assert bounded(many) == {f"k{i}": float(i) for i in range(100)}
    assert bounded(many, "k150") == {**bounded(many), "k150": 150.0}
    odd = {"x" * 101: 1.0, "huge": 10**400, "text": "a", 3: 1.0, "mixed": [1.0, "a"], "none": None, "flag": True}
    assert bounded({**odd, "good": 1, "nan": [float("nan")]}).keys() == {"good", "nan"}
    lists = {"long": [1.0] * 1001, "first": [1.0] * 600, "second": [1.0] * 600, "third": [1.0] * 400, "last": 1.0}
    assert bounded(lists).keys() == {"first", "third"}
    assert bounded({"weight": "odd"}, "weight") == {"weight": "odd"}
    assert bounded({"a": 1.0}, "weight") == {"a": 1.0}


def test_what_is_sent_is_made_once_per_version():
    server, made = Server(fedbuff(buffer_size=1), MODEL), []
    model_of = OncePerVersion(lambda version: made.append(version.version) or object())
    first = server.pull()
    assert model_of(first) is model_of(server.pull())
    server.push(client=1, version=first, update=MODEL)
    assert model_of(server.pull()) is model_of(server.pull())
    assert made == [0, 1]


# The loop


class Echo(Transport):
    """Clients that reply at once, in this process."""

    def __init__(self, clients=(1, 2, 3), fails=(), gone=()):
        self.there, self.fails, self.gone = list(clients), set(fails), set(gone)
        self.waiting, self.number = {}, 0
        self.steps, self.evaluated, self.told = [], [], None

    def clients(self):
        return self.there

    def send(self, address, task):
        if address in self.gone:
            return None
        self.number += 1
        self.waiting[str(self.number)] = address
        return str(self.number)

    def replies(self, keys):
        found = {key: self.waiting.pop(key) for key in keys if key in self.waiting}
        return [
            Reply(key, lambda: self.read(), "out of memory" if who in self.fails else None)
            for key, who in found.items()
        ]

    def read(self):
        return trained(metrics={"accuracy": 0.5})

    def step_done(self, step, metrics):
        self.steps.append((step, len(metrics)))

    def evaluate(self, step):
        self.evaluated.append(step)

    def notes(self):
        return {"steps": self.steps}

    def restore(self, notes):
        self.told = notes


def looped(transport, steps, rule=None, **settings):
    run = run_of(rule, num_clients=len(transport.there), poll_interval=0.001, **settings)
    with Loop(run, transport) as loop:
        loop.run(steps)
    return run


def test_the_loop_notes_each_step_once():
    transport = Echo()
    run = looped(transport, 7, evaluate_every=3)
    assert transport.steps == [(step, 2) for step in range(1, 8)]
    assert transport.evaluated == [0, 3, 6, 7]
    assert run.server.version == 7
    assert run.server.tasks == ()


def test_the_loop_logs_steps_and_counts(tmp_path, caplog):
    def lines(steps):
        caplog.clear()
        with caplog.at_level(logging.INFO, "afflux"):
            looped(Spoken(), steps, store=tmp_path / "store", concurrency=1)
        return [record.getMessage() for record in caplog.records]

    class Spoken(Echo):
        def step_done(self, step, metrics):
            return f"{len(metrics)} of step {step}"

        def finish(self):
            self.logger.info("finished")

    first = lines(2)
    assert [line.split(" staleness")[0] for line in first[:2]] == ["[STEP 1] 2 of step 1", "[STEP 2] 2 of step 2"]
    assert first[0].endswith("staleness: mean 0.0, largest 0")
    assert first[2:] == ["finished", "Made 2 steps: {'joined': 4}"]
    going_on = f"Going on from step 2 of store {tmp_path / 'store'}"
    assert lines(2) == [going_on, "finished", "No step was needed: the store holds step 2 of 2: {'joined': 4}"]
    assert lines(3)[0] == going_on
    assert lines(5)[-1] == "Made 2 steps, after 3 of earlier runs; of all runs: {'joined': 10}"


def test_the_notes_are_stored_before_the_first_step(tmp_path):
    class Interrupted(Echo):
        name = "first"

        def send(self, address, task):
            raise KeyboardInterrupt

    class Other(Echo):
        name = "other"

    run = run_of(store=tmp_path / "store")
    loop = Loop(run, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        loop.run(3)
    run.server.close(checkpoint=False)  # killed
    with pytest.raises(AffluxError, match="the store is of a run of 'first', and this one is of other"):
        looped(Other(), 3, store=tmp_path / "store")


def test_the_slowest_reply_is_known():
    run = run_of(clock=(clock := Clock()))
    for key, seconds in (("a", 2.0), ("b", 5.0), ("c", 1.0)):
        run.sent(key, run.assign(1))
        clock.now += seconds
        _ = run.fail(key) if key == "b" else run.receive(key, trained)
    assert run.slowest == 5.0
    run.note_duration(start=1.0)
    assert run.slowest == 7.0


def test_clients_that_fail_at_once_do_not_end_the_run_of_the_others():
    transport = Echo(fails={2}, gone={3})
    run = looped(transport, 300)
    assert run.server.version == 300
    assert 2 <= run.lost["failed"] <= 10


def test_the_loop_ends_when_nobody_is_of_use():
    transport = Echo(fails={1, 2}, gone={3})
    with pytest.raises(RuntimeError, match="none of 3 clients is of use"):
        looped(transport, 3, max_failures=2, retry_after=0.001)


def test_metrics_outlive_an_interrupt(tmp_path):
    class Interrupted(Echo):
        def step_done(self, step, metrics):
            super().step_done(step, metrics)
            if step == 5:
                self.read = self.interrupt  # before the next reply is taken in

        def interrupt(self):
            raise KeyboardInterrupt

    transport = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        looped(transport, 9, store=tmp_path / "store", checkpoint_every=100)
    again = Echo()
    looped(again, 9, store=tmp_path / "store")
    assert again.told == {"steps": [[step, 2] for step in range(1, 6)]}
    assert [step for step, _ in again.steps] == [6, 7, 8, 9]


def test_metrics_of_arrivals_that_wait_are_stored(tmp_path):
    run = run_of(fedbuff(buffer_size=2), store=tmp_path / "store")
    run.sent("a", run.assign(1))
    run.receive("a", lambda: trained(metrics={"accuracy": 0.25}))
    run.close({})
    again = run_of(fedbuff(buffer_size=2), store=tmp_path / "store")
    again.resume(dict)
    again.sent("b", again.assign(2))
    assert again.receive("b", lambda: trained(metrics={"accuracy": 0.75})).report.version == 1
    assert again.take_metrics() == [{"accuracy": 0.25}, {"accuracy": 0.75}]
    again.close()


def test_metrics_of_a_replaced_arrival_are_replaced():
    run = run_of(fedbuff(buffer_size=2), server_options={"duplicates": "latest"})
    for client, loss in ((1, 0.0), (1, 1.0), (1, 2.0), (2, 3.0)):
        run.sent("a", run.assign(client))
        run.receive("a", lambda loss=loss: trained(metrics={"loss": loss}))
    assert run.server.version == 1
    assert run.take_metrics() == [{"loss": 2.0}, {"loss": 3.0}]
    assert run.take_metrics() == []


def test_metrics_of_a_deferred_arrival_are_those_of_its_step(tmp_path):
    def opened():
        return run_of(gsgm(buffer_size=2), store=tmp_path / "store", client_lr=0.1, local_steps=1)

    def push(run, client, loss):
        run.sent("a", run.assign(client))
        return run.receive("a", lambda: trained(metrics={"loss": loss})).status

    run = opened()
    assert [push(run, 1, 1.0), push(run, 1, 1.5)] == ["joined", "deferred"]
    run.checkpoint({})
    assert push(run, 2, 2.0) == "joined"
    assert run.take_metrics() == [{"loss": 1.0}, {"loss": 2.0}]
    assert [push(run, 3, 3.0), push(run, 4, 4.0)] == ["joined", "joined"]
    assert run.take_metrics() == [{"loss": 3.0}, {"loss": 4.0}]
    run.server.close(checkpoint=False)  # killed: the notes are those of the checkpoint
    run = opened()
    run.resume(dict)
    assert [run.server.version, run.server.arrivals_waiting] == [2, 1]
    push(run, 2, 5.0)
    assert run.take_metrics() == [{"loss": 1.5}, {"loss": 5.0}]
    run.close({})


def test_a_store_goes_on_with_its_own_adapter(tmp_path):
    class Other(Echo):
        name = "other"

    class Named(Echo):
        name = "named"

    for transport in (Echo(), Named(), Named()):  # a store without a name is any adapter's
        looped(transport, 3, store=tmp_path / "store")
    with pytest.raises(AffluxError, match=r"the store is of a run of 'named', and this one is of other"):
        looped(Other(), 3, store=tmp_path / "store")
    Server.open(tmp_path / "store").close()


def test_notes_that_cannot_be_made_leave_no_lock(tmp_path):
    class NoNotes(Echo):
        def notes(self):
            raise TypeError("no notes")

    with pytest.raises(TypeError, match="no notes"):
        looped(NoNotes(), 3, store=tmp_path / "store")
    Server.open(tmp_path / "store").close()


def test_a_start_that_fails_leaves_no_lock(tmp_path):
    store = tmp_path / "store"
    run = run_of(ca2fl(buffer_size=2), store=store)
    one_round(run, [1, 2])
    run.close({"epoch": 3})

    class Strict(Echo):
        schema = dict[str, list[int]]

    with pytest.raises(AffluxError, match="notes are not those of this adapter"):
        looped(Strict(), 3, ca2fl(buffer_size=2), store=store)
    with pytest.raises(AffluxError, match="none of the 2 clients that are there"):
        looped(Echo(clients=(8, 9)), 3, ca2fl(buffer_size=2), store=store)
    with pytest.raises(AffluxError, match="another model"):
        TrainingRun(ca2fl(buffer_size=2), {"w": MODEL["w"]}, RunSettings(store=store), num_clients=2)
    Server.open(store).close()


def test_a_run_is_killed_with_clients_in_flight(tmp_path):
    run = run_of(fedbuff(buffer_size=2), store=tmp_path / "store", concurrency=2)
    for client in (1, 2):
        run.sent(str(client), run.assign(client))
    run.checkpoint({"epoch": 3})
    run.sent("later", run.assign(3))
    run.server.close(checkpoint=False)
    again = run_of(fedbuff(buffer_size=2), store=tmp_path / "store", concurrency=2)
    assert again.resume(dict[str, int]) == {"epoch": 3}
    assert again.server.tasks == ()
    again.clients.are([1, 2, 3])
    assert len(again.choose()) == 2  # all may train again
    assert again.receive("1", trained) is None
    assert again.lost["unknown"] == 1
    again.close()
