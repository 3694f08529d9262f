"""Handles of servers for other processes, with actors that are objects of this process (fake_ray.py): what crosses."""

import pickle
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from inspect import getmodule
from math import inf, nan
from types import SimpleNamespace
from uuid import UUID

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import AffluxError, BlockedError, BusyError, PlaneError, Server, StoreError, UnavailableError, rules
from afflux.aggregation.reports import STATUSES, Receipt, Report
from afflux.distributed import RayPlane, messages
from afflux.distributed.messages import Failed, decode, encode
from afflux.distributed.shard import Ref
from afflux.ops import Ingested
from afflux.server.pushing import CallError
from afflux.store.lock import InUseError
from conftest import bits, check_error, same_state
from sharded_runs import SUPERBLOCK

pytestmark = pytest.mark.filterwarnings("ignore:.RayPlane. .* elements a shard:RuntimeWarning")
SIZE = 2 * SUPERBLOCK + 77
VECTOR = np.linspace(-1, 1, SIZE, dtype=np.float32)


def comparable(value):
    """The value in a form that `==` compares: arrays and floats by their bits, references by their numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, bits(value)
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, Ref):
        return "ref", value.number
    if isinstance(value, msgspec.Struct):
        return type(value), {name: comparable(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [type(value) if hasattr(value, "_fields") else "sequence", *map(comparable, value)]
    return type(value), value


NUMBERS = st.integers(-(2**63), 2**64 - 1)
COUNTS = st.integers(0, 2**53)
FLOATS = st.floats() | st.sampled_from([nan, -nan, inf, -0.0])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS | st.binary(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXTS | NUMBERS, each, max_size=3),
)
IDS = NUMBERS | TEXTS
SECONDS = st.floats(min_value=0, exclude_min=True)
KIND = st.sampled_from(messages.get_args(messages.Kind))
REFS = st.builds(Ref, NUMBERS)


def arrays(dtype, values):
    return st.lists(values, max_size=4).map(lambda each: np.array(each, dtype))


FLOAT_ARRAYS = arrays(np.float64, FLOATS) | st.just(np.zeros((2, 0, 3))) | st.just(np.array(nan))
INT_ARRAYS = arrays(np.int64, st.integers(-(2**63), 2**63 - 1))
MAYBE = {name: st.none() | each for name, each in (("floats", FLOAT_ARRAYS), ("count", COUNTS))}
REPORTS = st.builds(
    Report,
    version=COUNTS,
    client_ids=st.lists(IDS, max_size=3).map(tuple),
    rejected=st.lists(TEXTS, max_size=3).map(tuple),
    scalars=st.dictionaries(TEXTS, FLOATS, max_size=2),
    stepped=st.booleans(),
    nbytes=COUNTS,
    cosines=MAYBE["floats"],
    clips=MAYBE["floats"],
    **dict.fromkeys(("joins", "versions", "staleness"), INT_ARRAYS),
    **dict.fromkeys(("weights", "norms"), FLOAT_ARRAYS),
    **dict.fromkeys(("server_lr", "seconds"), FLOATS),
)
RECEIPTS = st.builds(
    Receipt,
    status=st.sampled_from(STATUSES),
    version=COUNTS,
    report=st.none() | REPORTS,
    reason=TEXTS,
    **dict.fromkeys(("staleness", "join", "step", "durable"), MAYBE["count"]),
)
CONVERSIONS = st.tuples(KIND, KIND, st.none() | REFS, st.floats())
SLICES = st.lists(st.tuples(REFS, REFS, COUNTS, st.none() | CONVERSIONS), max_size=3).map(tuple)
FACTS = st.lists(st.builds(Ingested, MAYBE["count"], FLOATS, FLOATS, FLOATS), max_size=3).map(tuple)
KINDS, ARGUMENTS = st.lists(KIND, max_size=3).map(tuple), st.dictionaries(TEXTS, PLAIN, max_size=3)
#: What the fields of each message may be.
FIELDS = {
    messages.Checkout: (PLAIN, PLAIN, PLAIN),
    messages.Push: (KINDS, ARGUMENTS, MAYBE["floats"], SECONDS),
    messages.Pull: (PLAIN, SECONDS),
    messages.Written: (FACTS,),
    messages.Done: (),
    messages.Failed: (TEXTS, st.lists(PLAIN, max_size=3).map(tuple), st.none() | st.booleans()),
    messages.SliceWrites: (COUNTS, SLICES),
    messages.VersionParts: (COUNTS, COUNTS, MAYBE["floats"], st.lists(REFS, max_size=3).map(tuple)),
    messages.PushResult: (RECEIPTS,),
    messages.RemoteTask: (TEXTS, IDS, COUNTS),
}
MESSAGES = {kind: st.builds(kind, *fields) for kind, fields in FIELDS.items()}


def test_the_strategies_are_of_all_messages():
    assert {*MESSAGES} == {*messages.Message.__subclasses__()}


@settings(deadline=None)
@given(st.one_of(*MESSAGES.values()))
def test_messages_arrive_as_they_were_sent(message):
    data = encode(message)
    assert comparable(decode(data, "", *MESSAGES)) == comparable(message)
    assert comparable(decode(data, "", type(message))) == comparable(message)


@settings(deadline=None, max_examples=30)
@given(st.one_of(*MESSAGES.values()), st.data())
def test_messages_that_are_cut_off_or_of_another_kind_are_errors(message, data):
    content = encode(message)
    cut = data.draw(st.integers(0, len(content) - 1))
    check_error("^.handle. cannot be read: ", decode, content[:cut], "cannot be read", *MESSAGES)
    others = [kind for kind in MESSAGES if kind is not type(message)]
    check_error("Invalid value", decode, content, "cannot be read", *others)


class Colour(IntEnum):
    RED = 3


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.int8(-3), -3),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64(2.0), 2.0),
        (np.array(7), 7),
        (np.bool_(True), True),
        (Fraction(1, 2), 0.5),
        (Colour.RED, 3),
        (Text("ann"), "ann"),
        (np.str_("ann"), "ann"),
        ({Text("loss"): np.float32(1)}, {"loss": 1.0}),
        ((1, None), [1, None]),
        (b"\xff", b"\xff"),
    ],
)
def test_arguments_become_plain_data(value, expected):
    result = messages.plain("it", value)
    assert comparable(result) == comparable(expected)
    assert type(result) is type(expected)


def test_numbers_of_torch_become_plain_data():
    import torch

    assert messages.plain("it", torch.tensor(0.5)) == 0.5
    assert type(messages.plain("it", torch.tensor(3))) is int


@dataclass
class Facts:
    loss: float = 1.0


class Executed:
    """Unpickling it is noticed."""

    times = 0

    def __reduce__(self):
        return executed, ()


def executed():
    Executed.times += 1


def test_other_arguments_are_refused():
    """Not sent as a text or a dict, which msgspec would make of them."""
    refused = [Executed(), executed, Facts(), {1.0}, UUID(int=3), Decimal("0.5"), np.ones(3), np.datetime64("2026")]
    for value in [*refused, 2**64, -(2**63) - 1, "\ud800", [{"x": "\ud800"}], Fraction(10) ** 400, 1j]:
        check_error("^it is .*: a handle sends numbers", messages.plain, "it", value)
    assert Executed.times == 0


class OwnError(StoreError):
    """Of a caller: no other process can import it."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (AffluxError("[push] client 'ann'"), AffluxError, None),
        (CallError("[push] give one of"), AffluxError, None),
        (InUseError("used"), StoreError, None),
        (BlockedError("wait"), BlockedError, None),
        (BusyError("busy"), BusyError, None),
        (PlaneError("lost"), PlaneError, None),
        (UnavailableError("no"), UnavailableError, None),
        (KeyError("name"), KeyError, None),
        (MemoryError(), MemoryError, None),
        (FileNotFoundError(2, "No such file", "name"), FileNotFoundError, None),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), UnicodeDecodeError, None),
        (ValueError(Executed), AffluxError, "[handle] ValueError: "),
        (OwnError("full"), AffluxError, f"[handle] {__name__}.OwnError: full"),
        (KeyboardInterrupt("stop"), AffluxError, "[handle] KeyboardInterrupt: stop"),
    ],
)
def test_errors_cross_by_their_names(error, kind, text):
    sent = decode(encode(Failed.of(error)), "", Failed).error()
    assert type(sent) is kind
    assert str(sent) == str(error) if text is None else str(sent).startswith(text)
    assert getmodule(kind).__name__.partition(".")[0] in ("afflux", "builtins")


@pytest.mark.parametrize("joined", [True, False, None])
def test_errors_of_a_store_say_whether_the_arrival_has_joined(joined):
    error = StoreError("full")
    error.joined = joined
    assert decode(encode(Failed.of(error)), "", Failed).error().joined is joined


def test_an_error_of_no_known_class_is_afflux_s():
    """Nothing is imported for a name."""
    for name in ("os.system", "Executed", "KeyboardInterrupt", "SystemExit", "print"):
        assert type(Failed(name, ("text",)).error()) is AffluxError


def tree(vector):
    return {"w": vector[:SUPERBLOCK].reshape(2, -1).copy(), "layers": [vector[SUPERBLOCK:].copy()]}


def without_names_of_tasks(server):
    return [type(entry)(**{**fields(entry), "task": ""}) if hasattr(entry, "task") else entry for entry in server.log]


def fields(entry):
    return entry._asdict() if hasattr(entry, "_asdict") else {name: getattr(entry, name) for name in entry.__slots__}


PUSHES = [
    {"client": 2**64 - 1, "version": 0, "update": VECTOR, "num_examples": np.int64(3), "loss": nan},
    {"client": -(2**63), "version": 0, "update": VECTOR.astype(np.float64), "loss": np.float32(0.1)},
    {"client": "ann ö", "version": 1, "model": tree(VECTOR), "facts": {"speed": np.float32(0.5)}},
    {"client": 7, "version": 1, "gradient": VECTOR, "client_lr": 0.1, "local_steps": np.int8(3)},
    {"client": 7, "staleness": 1, "update": tree(VECTOR), "timeout": 60},
    {"client": 8, "version": 2, "num_examples": 0},
    {"client": 9, "version": 1, "update": VECTOR * np.nan},
    {"client": 9, "version": 77, "update": VECTOR},
    {"client": 9.5, "version": 0, "update": VECTOR},
    {"client": [9], "version": 0, "update": VECTOR},
    {"client": 9, "version": 0, "update": VECTOR, "facts": {"weight": 1.0}},
    {"client": 9, "version": 0, "update": VECTOR, "num_examples": -1},
    {"client": 9, "version": 0, "update": VECTOR, "gradient": VECTOR},
    {"client": 9, "version": 0},
    {"client": 9, "update": VECTOR},
    {"client": 9, "version": 0, "update": VECTOR, "timeout": "soon"},
    {"client": 9, "version": 0, "update": VECTOR, "colour": "blue"},
    {"task": "never opened", "update": VECTOR},
    {"task": 5, "update": VECTOR},
]


def outcome(push, arguments):
    """The receipt of a push, without the seconds of its round; or the class and the message of its error."""
    try:
        receipt = push(**arguments)
    except Exception as error:
        public = next(kind for kind in type(error).__mro__ if not kind.__name__.startswith(("Call", "Client")))
        return public, str(error)
    report = receipt.report and msgspec.structs.replace(receipt.report, seconds=0.0)
    return comparable(receipt._replace(report=report))


@pytest.mark.parametrize("faults", ["raise", "record"])
def test_a_handle_has_the_receipts_errors_and_bits_of_the_server(faults, ray):
    options = {"log": True, "facts": ("speed",), "faults": faults}
    one = Server(rules.fedbuff(buffer_size=2), tree(VECTOR), **options)
    server = Server(rules.fedbuff(buffer_size=2), tree(VECTOR), plane=RayPlane(2), **options)
    handle = server.handle()
    for arguments in PUSHES:
        expected = outcome(one.push, arguments)
        assert outcome(handle.push, arguments) == expected, arguments
    for hold in (True, False):
        task, expected = handle.checkout(2**64 - 1, lease=np.float32(60), hold=hold), one.checkout(5, hold=hold)
        pulled = handle.pull(3, SIZE - 3, task=task)
        assert (task.client, task.version, pulled.version) == (2**64 - 1, expected.version, expected.version)
        assert bits(pulled.params) == bits(expected.params[3:-3])
        assert not pulled.params.flags.writeable
        call = {"model": tree(VECTOR)}
        assert handle.push(task=task, **call).status == one.push(task=expected, **call).status == "joined"
        assert handle.push(task=task.id, **call).reason == one.push(task=expected, **call).reason != ""
        pulled = handle.pull()
        version = {"version": pulled if hold else pulled.version}
        assert outcome(handle.push, {"client": 3, "update": ray.put(VECTOR), **version}) == outcome(
            one.push, {"client": 3, "version": one.version, "update": VECTOR}
        )
    assert bits(handle.pull().params) == bits(one.params)
    assert {**server.counts, "refused": 0} == {**one.counts, "refused": 0}


def test_buffers_of_modules_cross(ray):
    import torch

    torch.manual_seed(1)
    module, trained = [torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(2)]
    trained(torch.randn(8, 3))
    one = Server(rules.fedbuff(buffer_size=1), module)
    server = Server(rules.fedbuff(buffer_size=1), module, plane=RayPlane(1))
    handle, update = server.handle(), {name: p.detach() * 0.1 for name, p in trained.named_parameters()}
    for i, vector in enumerate(
        [{"model": trained}, {"model": trained.state_dict()}, {"update": update, "buffers": trained.state_dict()}]
    ):
        expected = outcome(one.push, {"client": i, "version": i, **vector})
        assert outcome(handle.push, {"client": i, "version": i, **vector}) == expected
        pulled, of_one = handle.pull(), one.pull()
        assert (bits(pulled.params), bits(pulled.buffers)) == (bits(of_one.params), bits(of_one.buffers))
        assert pulled.buffers.any()
    handle.layout.load(trained, pulled.params, pulled.buffers)
    check_error("push lacks the model's buffers", handle.push, client=1, version=3, update=update)


def test_errors_of_the_server_s_own_code(ray, monkeypatch):
    """Of the server, its store, and the program's functions, each as its class or by its text."""
    server = Server(rules.fedbuff(buffer_size=1), VECTOR, plane=RayPlane(2))
    handle, full = server.handle(), StoreError("the disk is full")
    full.joined = True
    for error, kind in (
        (full, StoreError),
        (BusyError("all slots"), BusyError),
        (PermissionError(13, "no", "x"), OSError),
    ):

        def checkout(*own, error=error, **options):
            raise error

        monkeypatch.setattr(Server, "checkout", checkout)
        with pytest.raises(kind) as caught:
            handle.checkout(1)
        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
        assert getattr(caught.value, "joined", None) == getattr(error, "joined", None)
    monkeypatch.setattr(Server, "checkout", lambda *own, **options: SimpleNamespace(id=executed, client=1, version=0))
    check_error("a handle sends numbers", handle.checkout, 1)
    monkeypatch.setattr(Server, "checkout", lambda *own, **options: SimpleNamespace(id=5, client=1, version=0))
    check_error("the client cannot read the reply: .*Expected `str`, got `int`", handle.checkout, 1)


def test_a_slice_that_a_shard_refuses_is_the_error_of_the_server(ray):
    rule = rules.fedbuff(buffer_size=1)
    one = Server(rule, tree(VECTOR), max_slots=1)
    server = Server(rule, tree(VECTOR), plane=RayPlane(2), max_slots=1)
    for wrong in ({"update": VECTOR.astype(np.int32)}, {"model": tree(VECTOR.astype(">f4"))}, {"update": VECTOR[1:]}):
        expected = outcome(one.push, {"client": 1, "version": 0, **wrong})
        assert outcome(server.handle().push, {"client": 1, "version": 0, "timeout": 0, **wrong}) == expected


PUSH = {"type": "Push", "kinds": ["update"], "arguments": {"client": 1, "version": 0}, "buffers": None, "timeout": 60.0}
FACT = [None, 1.0, 0.0, 1.0]
#: The first of two shards has two parts.
PARTS = 3


def hostile_requests():
    """First requests by what is wrong."""
    without = {name: each for name, each in PUSH.items() if name != "kinds"}
    array = ["<f8", [2], bytes(16)]
    return {
        "nothing": b"",
        "an object": pickle.dumps(Executed()),
        "no message": msgspec.msgpack.encode([1]),
        "a wrong tag": msgspec.msgpack.encode({**PUSH, "type": "Step"}),
        "the tag of a reply": encode(messages.RemoteTask("1", 1, 1)),
        "the tag of a second request": encode(messages.Done()),
        "a missing field": msgspec.msgpack.encode(without),
        "another field": msgspec.msgpack.encode({**PUSH, "rule": "fedavg"}),
        "an unknown kind": msgspec.msgpack.encode({**PUSH, "kinds": ["params"]}),
        "a truncated message": msgspec.msgpack.encode(PUSH)[:-3],
        "bytes after it": msgspec.msgpack.encode(PUSH) + b"\xc0",
        "a truncated buffer": msgspec.msgpack.encode({**PUSH, "buffers": [*array[:2], bytes(15)]}),
        "a shape of fewer bytes": msgspec.msgpack.encode({**PUSH, "buffers": ["<f8", [1], bytes(16)]}),
        "a shape of more bytes": msgspec.msgpack.encode({**PUSH, "buffers": ["<f8", [2**40, 2**24], bytes(16)]}),
        "a negative shape": msgspec.msgpack.encode({**PUSH, "buffers": ["<f8", [-1], bytes(16)]}),
        "a dtype of objects": msgspec.msgpack.encode({**PUSH, "buffers": ["|O", [2], bytes(16)]}),
        "another dtype": msgspec.msgpack.encode({**PUSH, "buffers": ["<i8", [2], bytes(16)]}),
        "no time": msgspec.msgpack.encode({**PUSH, "timeout": 0}),
        "a time that is no number": msgspec.msgpack.encode({**PUSH, "timeout": nan}),
        "too deep": b"\x91" * 100_000 + b"\xc0",
    }


@pytest.fixture
def server(ray):
    return Server(rules.fedbuff(buffer_size=1), VECTOR, plane=RayPlane(2), max_slots=1)


def reply(ray, handle, token, request):
    """The reply to a request of these bytes."""
    return decode(ray.get(handle._mailbox.ask.remote(token, request)), "", *MESSAGES)


@pytest.mark.parametrize("wrong", hostile_requests())
def test_a_request_that_is_wrong_changes_nothing(wrong, server, ray):
    handle, before = server.handle(), server.state_dict()
    answer = reply(ray, handle, None, hostile_requests()[wrong])
    assert type(answer.error()) is AffluxError
    assert str(answer.error()).startswith("[handle] the server's process cannot read the request: ")
    same_state(server.state_dict(), before)
    assert Executed.times == 0
    assert handle.push(client=1, version=0, update=VECTOR, timeout=0).version == 1


@pytest.mark.parametrize(("token", "request_"), [(None, None), (None, "Push"), (None, 5), ([0], b""), ("it", b"")])
def test_what_is_no_bytes_does_not_reach_the_server(token, request_, server, ray):
    """The server's process would unpickle it."""
    handle = server.handle()
    with pytest.raises((TypeError, ValueError)):
        ray.get(handle._mailbox.ask.remote(token, request_))
    assert handle.push(client=1, version=0, update=VECTOR).version == 1


def hostile_continuations():
    """Second requests of a push, and what the error says."""
    cannot = "the server's process cannot read the request: "
    written = {"type": "Written", "facts": [FACT] * PARTS}
    return {
        "an object": (pickle.dumps(Executed()), cannot),
        "another tag": (encode(messages.Done()), cannot),
        "a first request": (msgspec.msgpack.encode(PUSH), cannot),
        "a missing field": (msgspec.msgpack.encode({"type": "Written"}), cannot),
        "a truncated message": (msgspec.msgpack.encode(written)[:-1], cannot),
        "facts of one slice": (msgspec.msgpack.encode({**written, "facts": [FACT]}), "facts of 1 slices, of 3"),
        "facts of four": (msgspec.msgpack.encode({**written, "facts": [FACT] * 4}), "facts of 4 slices, of 3"),
        "facts of other types": (msgspec.msgpack.encode({**written, "facts": [FACT, ["x", 1.0, 0.0, 1.0]]}), cannot),
        "facts that are short": (msgspec.msgpack.encode({**written, "facts": [FACT, FACT[:2]]}), cannot),
        "an error of no class": (encode(Failed("os.system", ("true",))), "client 1's update: true"),
        "an error that cannot be made": (encode(Failed("UnicodeDecodeError", (1,))), "cannot be read: TypeError"),
        "an index that no vector has": (
            msgspec.msgpack.encode({**written, "facts": [[-9, *FACT[1:]]] * PARTS}),
            "index",
        ),
    }


@pytest.mark.parametrize("wrong", hostile_continuations())
def test_a_second_request_that_is_wrong_changes_nothing(wrong, server, ray):
    """The only slot comes back at once."""
    handle, before = server.handle(), server.state_dict()
    data, message = hostile_continuations()[wrong]
    first = reply(ray, handle, None, msgspec.msgpack.encode(PUSH))
    answer = reply(ray, handle, first.token, data)
    assert type(answer.error()) is AffluxError
    assert message in str(answer.error())
    after = server.state_dict()
    assert after["meta"]["counts"].pop("refused") == before["meta"]["counts"].pop("refused") + 1
    same_state(after, before)
    assert Executed.times == 0
    late = reply(ray, handle, first.token, encode(messages.Written((Ingested(*FACT),) * PARTS)))
    assert "their slot was given up" in str(late.error())
    assert handle.push(client=1, version=0, update=VECTOR, timeout=0).version == 1


def test_a_pull_that_ends_with_another_request_is_an_error_of_that_client(server, ray):
    handle = server.handle()
    first = reply(ray, handle, None, encode(messages.Pull(None, 60.0)))
    answer = reply(ray, handle, first.token, b"\xc1")
    assert "cannot read the request: msgspec.DecodeError" in str(answer.error())
    assert handle.push(client=1, version=0, update=VECTOR).version == 1
    assert server.versions_held == 1


def test_a_client_that_does_not_go_on_gives_up_its_slot(server, ray):
    handle = server.handle(timeout=0.05)
    first = reply(ray, handle, None, msgspec.msgpack.encode({**PUSH, "timeout": 0.05}))
    assert isinstance(first, messages.SliceWrites)
    assert handle.push(client=1, version=0, update=VECTOR, timeout=60).version == 1
    assert "their slot was given up" in str(reply(ray, handle, first.token, encode(messages.Done())).error())


def test_a_reply_that_is_wrong_is_an_error_of_the_client(server, ray, monkeypatch):
    handle = server.handle()
    cut = encode(messages.RemoteTask("1", 1, 1))[:-1]
    for data in (None, b"", pickle.dumps(Executed()), encode(messages.Done()), cut):
        monkeypatch.setattr(type(handle), "_send", lambda *own, data=data: ray.put(data))
        for call in (lambda: handle.checkout(1), handle.pull, lambda: handle.push(client=1, version=0, update=VECTOR)):
            check_error("^.handle. the client cannot read the reply: ", call)
    assert Executed.times == 0


def test_nothing_that_crosses_is_a_pickle(server, ray):
    """Neither requests nor replies; slices go to the shards by Ray."""
    handle, mailbox = server.handle(), server.handle()._mailbox
    ray.messages.clear()
    task = handle.checkout("ann")
    handle.pull(task=task)
    handle.push(task=task, model=VECTOR, loss=0.5)
    crossed = [pickle.loads(message) for actor, name, message in ray.messages if actor is mailbox and name != "next"]
    assert len(crossed) == 10
    assert all(msgspec.msgpack.decode(data)["type"] in {kind.__name__ for kind in MESSAGES} for _, data in crossed)
