"""Errors that callers keep: their tracebacks hold no slot, no version and no draft, so that the server goes on."""

import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from afflux import AffluxError, BusyError, Server, StoreError, UnavailableError
from afflux.rules import ca2fl, fedasync, fedavg, fedbuff, gsgm, zenopp
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.server.checkout import Task
from conftest import raising
from inside import aggregator_of, make_rounds_by, rounds_of, slots_taken
from surroundings import references_alone

D = 5
UPDATE = np.ones(D, np.float32)
NAN = np.full(D, np.nan, np.float32)


class Failing:
    """Weights of 1, and an error or a value that is not finite while `fault` is set."""

    def __init__(self, fault=None):
        self.fault, self.on_weigh = fault, None

    def __call__(self, arrivals):
        if self.on_weigh is not None:
            self.on_weigh()
        if self.fault is not None:
            raise self.fault
        return np.ones(len(arrivals))


def own(weigh, buffer_size=1):
    return Rule("own", "update", buffer_size, weigh, NONE, Sgd(0.5))


def held(server):
    return slots_taken(server), server.versions_held


def check(server, *calls, error=AffluxError, times=3):
    """Make calls that fail, keep their errors, and compare the slots and versions in use with those before."""
    with references_alone():
        before, errors = held(server), []
        for call in calls * times:
            with pytest.raises(error) as raised:
                call()
            errors.append(raised.value)
            del raised
            assert held(server) == before
        return errors


def pushed(server, client=0, version=None, **given):
    """Push with a version that only the frames of the call hold."""
    given = given or {server.rule.kind: UPDATE}
    return server.push(client=client, version=server.pull() if version is None else version, timeout=0, **given)


def test_pushes_before_a_rule_vector_is_set():
    """M = 1 with one slot, by the fast path, the path of trees and by threads: each push raises, and none waits."""
    server = Server(zenopp(), np.zeros(D, np.float32), max_slots=1, max_versions=2)
    errors = check(server, lambda: pushed(server), lambda: server.push(client=1, version=0, gradient=UPDATE))
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(server.push, client=i, version=0, gradient=UPDATE) for i in range(8)]
        errors += [future.exception(10) for future in futures]
    assert {str(error)[:9] for error in errors} == {"[zenopp] "}
    server.set_rule_vector("validation", UPDATE)
    assert server.push(client=1, version=0, gradient=UPDATE, timeout=0).version == 1
    assert server.counts["refused"] == len(errors)


def test_pushes_with_invalid_arguments():
    server = Server(fedasync(), {"w": np.zeros(D, np.float32)}, max_versions=2, max_slots=1)
    task = server.checkout(1)
    errors = check(
        server,
        lambda: pushed(server, update={"w": NAN}),
        lambda: pushed(server, model={"w": NAN}),
        lambda: pushed(server, model=[]),
        lambda: pushed(server, update=UPDATE, num_examples=-1),
        lambda: pushed(server, update=UPDATE, client_lr=0.0, local_steps=1),
        lambda: pushed(server, gradient=UPDATE),
        lambda: pushed(server, update=None, model=None),
        lambda: server.push(task=task, update=NAN),
        lambda: server.push(task=task, client=1, update=UPDATE),
        lambda: server.pull(out=np.zeros(D + 1)),
        lambda: task.load([]),
        lambda: server.set_rule_vector("none", UPDATE),
        lambda: server.replace_rule(fedavg()),
        lambda: server.checkout(-1.5),
        lambda: server.load_state_dict(server.state_dict() | {"arrays": {}}),
        times=2,
    )
    for version in range(1, 4):
        assert server.push(client=0, version=server.version, update=UPDATE, timeout=0).version == version
    assert errors


def test_steps_of_more_clients_than_there_is_room_for():
    """With rows that are copied, and in a pass whose vectors are read where they are: no draft of the step is kept."""
    for rule in (ca2fl(buffer_size=2), gsgm(buffer_size=5)):
        server = Server(rule, np.zeros(D, np.float32), num_clients=2, max_slots=5)
        kind = server.rule.kind
        server.push(client=0, version=0, **{kind: UPDATE.copy()})
        vectors = [UPDATE.copy() for _ in range(2)]
        left = [weakref.ref(vector) for vector in vectors]
        entries = [(client, 0, vector) for client, vector in enumerate(vectors, 1)]
        check(server, partial(server.step, entries))
        vectors.clear()
        entries.clear()
        assert [vector() for vector in left] == [None, None]
        server.discard()
        assert slots_taken(server) == 0


def test_rounds_whose_weigh_part_raises():
    """By a push of each path, by flush, and by poll."""
    weigh = Failing(RuntimeError("weigh"))
    server = Server(own(weigh, 2), np.zeros(D, np.float32), max_slots=2, max_versions=2)
    pushed(server, 0)
    check(
        server,
        lambda: pushed(server, 1),
        lambda: server.push(client=1, version=0, update=UPDATE),
        server.flush,
        error=RuntimeError,
    )
    weigh.fault = KeyboardInterrupt()
    check(server, lambda: pushed(server, 1), server.flush, error=KeyboardInterrupt)
    weigh.fault = None
    assert pushed(server, 1).version == 1
    assert pushed(server, 1).status == "joined"
    assert pushed(server, 2).version == 2


def test_the_frames_of_a_rule_are_left_to_a_debugger():
    weigh = Failing(RuntimeError("weigh"))
    (error,) = check(
        server := Server(own(weigh), np.zeros(D, np.float32)), lambda: pushed(server), error=RuntimeError, times=1
    )
    entry = error.__traceback__
    while entry.tb_next is not None:
        entry = entry.tb_next
    assert entry.tb_frame.f_locals["arrivals"].client_ids == (0,)


def test_pushes_from_within_a_rule_and_on_a_closed_server_are_counted(tmp_path):
    """Their frames hold the state of the server, too."""
    messages, weigh = [], Failing()
    server = Server(own(weigh), np.zeros(D, np.float32), max_slots=1, max_versions=2)

    def amid():
        for call in (lambda: pushed(server, 1), server.flush):
            try:
                call()
            except AffluxError as error:
                messages.append(str(error))

    weigh.on_weigh = amid
    for version in range(1, 4):
        assert pushed(server, 0).version == version
    assert len(messages) == 6
    assert all("called from within the rule's weigh" in message for message in messages)
    assert (server.counts["refused"], server.counts["joined"]) == (3, 3)
    server = Server(fedbuff(buffer_size=2), np.zeros(D, np.float32), store=tmp_path / "s", max_versions=3)
    pushed(server, 0)
    server.close()
    check(server, lambda: pushed(server, 1), server.flush, error=StoreError)
    assert (server.counts["refused"], server.counts["joined"]) == (3, 1)


def test_all_slots_or_versions_in_use():
    server = Server(fedbuff(buffer_size=2), np.zeros(D, np.float32), max_slots=2, max_versions=2)
    first = server.pull()
    for client in range(2):
        pushed(server, client, 0)
    plane = aggregator_of(server).plane
    taken = [plane.reserve(), plane.reserve()]
    errors = check(server, lambda: pushed(server, 0), error=BusyError)
    del taken
    pushed(server, 0)
    errors += check(server, lambda: pushed(server, 1), server.flush)
    assert {str(error)[:9] for error in errors} == {"[push] al", "[flush] a"}
    del first
    assert pushed(server, 1).version == 2
    assert held(server) == (0, 1)  # also the rounds that could not be prepared hold nothing


@pytest.mark.parametrize("call", [lambda server: pushed(server, 1), Server.flush], ids=["push", "flush"])
def test_steps_that_write_a_value_that_is_not_finite(call):
    """A loaded state then finds all slots and versions."""
    server = Server(own(Failing(), 2), np.zeros(D, np.float32), max_slots=2, max_versions=2)
    state, run = server.state_dict(), rounds_of(server)
    pushed(server, 0)

    def unsound(job):
        run(job)
        job.done[0] = False

    make_rounds_by(server, unsound)
    with pytest.raises(AffluxError, match="not finite") as raised:
        call(server)
    errors = [raised.value]
    del raised
    assert held(server) == (0, 1)
    errors += check(server, lambda: pushed(server, 1), server.flush, server.checkpoint)
    make_rounds_by(server, run)
    server.load_state_dict(state)
    assert pushed(server, 0).status == pushed(server, 1).status == "joined"
    assert (server.version, len(errors)) == (1, 10)


def test_steps_that_a_store_cannot_save(tmp_path, monkeypatch):
    """The round waits for the next call; its slots and draft are the state's, not the errors'."""
    server = Server(
        ca2fl(buffer_size=1), np.zeros(D, np.float32), num_clients=3, store=tmp_path / "s", max_slots=2, max_versions=3
    )
    save = aggregator_of(server).storage.save_round
    monkeypatch.setattr(aggregator_of(server).storage, "save_round", raising(StoreError, "[commit] the disk is full"))
    with pytest.raises(StoreError) as raised:
        pushed(server, 0)
    errors = [raised.value]
    del raised
    errors += check(server, server.flush, server.checkpoint, lambda: server.rows, error=StoreError)
    monkeypatch.setattr(aggregator_of(server).storage, "save_round", save)
    assert server.flush() is None
    assert held(server)[0] == 0
    assert errors[0].joined
    server.close()
    errors += check(server, lambda: pushed(server, 0), server.flush, server.checkpoint, error=StoreError)


def test_an_error_holds_no_vector_of_its_client():
    """The caller's frame passes the only reference on."""
    server, kept = Server(fedbuff(), np.zeros(D, np.float32)), []
    for length, client, value in ((D, 1, np.nan), (D + 1, 1, 1.0), (D, None, 1.0)):
        box = [np.full(length, value, np.float32)]
        vector = weakref.ref(box[0])
        try:
            server.push(client=client, version=0, update=box.pop())
        except AffluxError as error:
            kept.append(error)
        assert vector() is None
    assert len(kept) == 3


#: Public calls that use no slot and no version.
PLAIN = {
    *("rule", "version", "layout", "constants", "arrivals_waiting", "waiting", "entered", "joins", "counts", "faults"),
    *("versions_held", "scalars", "state_bytes", "counts_since_round", "id", "client"),
}


@pytest.mark.parametrize("kind", [Server, Task])
def test_every_call_clears_the_tracebacks_of_its_errors(kind):
    for name, call in vars(kind).items():
        public = not name.startswith("_") or (kind is Server and name in ("__init__", "__exit__", "__reduce__"))
        if not public or name in PLAIN or (kind is Task and name in ("version", "copied")):
            continue
        call = call.fget if isinstance(call, property) else call
        assert name in ("push", "pull") or hasattr(call, "__wrapped__"), name


class Keeping:
    """Weights of 1, and an error that each of its functions catches and keeps."""

    def __init__(self):
        self.errors = []

    def _keep(self):
        try:
            raise RuntimeError
        except RuntimeError as error:
            self.errors.append(error)

    def __call__(self, arrivals):
        self._keep()
        return np.ones(len(arrivals))

    def on_arrival(self, staleness, num_examples, norm):
        self._keep()
        return 1.0

    def factor(self, arrivals):
        self._keep()
        return 1.0


@pytest.mark.parametrize("accumulate", [False, True])
def test_errors_that_a_rule_catches_and_keeps(accumulate):
    """Their tracebacks end in the rule, whose frames refer to those of the push above it; also without an error."""
    weigh = Keeping()
    server = Server(own(weigh, 2), np.zeros(D, np.float32), max_slots=2, max_versions=2, accumulate=accumulate)
    with references_alone():
        for version in range(1, 6):
            pushed(server, 0)
            assert (server.push(client=1, version=0, update=UPDATE) if version % 2 else pushed(server, 1)).step
            pushed(server, 2)
            assert server.flush().version == 2 * version
            assert server.version == 2 * version
    assert weigh.errors


#: A call of each public method that raises; no frame of these functions holds the server.
RAISING = {
    "push": lambda box: box[0].push(client=1, version=0, update=NAN),
    "push of no vector": lambda box: box[0].push(client=1, version=0),
    "push of a round": lambda box: (pushed(box[0], 1), box[0].push(client=2, version=0, update=UPDATE)),
    "push of a task": lambda box: box[0].push(task=box[0].checkout(1), client=1, update=UPDATE),
    "step": lambda box: box[0].step([(1, 0, NAN)]),
    "step into another length": lambda box: box[0].step([(1, 0, UPDATE)], out=np.zeros(D + 1)),
    "step of a round": lambda box: box[0].step([(1, 0, UPDATE), (2, 0, UPDATE)]),
    "pull": lambda box: box[0].pull(out=np.zeros(D + 1)),
    "flush": lambda box: (pushed(box[0], 1), box[0].flush()),
    "set_params": lambda box: (pushed(box[0], 1), box[0].set_params(UPDATE)),
    "set_rule_vector": lambda box: box[0].set_rule_vector("mean", UPDATE),
    "replace_rule": lambda box: box[0].replace_rule(fedavg()),
    "checkout": lambda box: box[0].checkout(1.5),
    "handle": lambda box: box[0].handle(),
    "log": lambda box: box[0].log,
    "checkpoint": lambda box: box[0].checkpoint(object()),
    "load_state_dict": lambda box: box[0].load_state_dict({}),
    "pickle": lambda box: pickle.dumps(box[0]),
    "open": lambda box: Server.open(box[0]._store.path),
    "Task.params": lambda box: (box[0].checkout(1, hold=False), box[0].set_params(UPDATE), box[0].tasks[-1].params),
    "Task.load": lambda box: box[0].checkout(1).load(np.zeros(D + 1)),
    "Task.pickle": lambda box: pickle.dumps(box[0].checkout(1)),
}


@pytest.mark.parametrize("name", RAISING)
def test_errors_that_are_kept_hold_no_server(name, tmp_path):
    """The store of a deleted server can be opened, and its memory is freed, while the errors of its calls are kept."""
    rule, errors = own(Failing(ValueError("of the rule")), 2), []
    box = [Server(rule, np.zeros(D, np.float32), store=tmp_path / "store")]
    server, aggregator = weakref.ref(box[0]), weakref.ref(aggregator_of(box[0]))
    with references_alone():
        for _ in range(100):
            try:
                RAISING[name](box)
            except (AffluxError, UnavailableError, ValueError) as error:
                errors.append(error)
            box[0].discard()
        box.clear()
        assert (len(errors), server(), aggregator()) == (100, None, None)
    Server.open(tmp_path / "store", rule=rule).close()


def raised():
    try:
        raise ValueError("of the user")
    except ValueError as error:
        return error


@pytest.mark.parametrize("place", ["weigh", "on_step", "log"])
@pytest.mark.parametrize("call", ["push", "flush", "step", "poll"])
def test_errors_that_functions_of_the_user_keep_hold_no_server(place, call, caplog):
    """The frames above such a function are those of a call that has returned."""
    errors = []

    def on_step(report):
        errors.append(raised())
        if place == "log":  # caplog keeps the traceback
            raise errors.pop()

    weigh = Failing()
    weigh.on_weigh = lambda: errors.append(raised())
    options = {"on_step": None if place == "weigh" else on_step, "flush_after": 1e-9 if call == "poll" else None}
    box = [Server(own(weigh if place == "weigh" else Failing(), 2), np.zeros(D, np.float32), **options)]
    server, aggregator = weakref.ref(box[0]), weakref.ref(aggregator_of(box[0]))
    with references_alone():
        pushed(box[0], 1, 0)
        arguments = {"push": {"client": 2, "version": 0, "update": UPDATE}, "step": {"pushes": [(2, 0, UPDATE)]}}
        getattr(box[0], call)(**arguments.get(call, {}))
        assert (box.pop().version, server(), aggregator()) == (1, None, None)
        assert len(errors or caplog.records) == 1
