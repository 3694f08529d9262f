"""Runs with a store: what is stored when, what a resumed run finds, and stores that are not locked after a failure."""

import pytest

from afflux import AffluxError, Server
from afflux.integrations._core import TrainingRun
from afflux.integrations._loop import Loop
from afflux.integrations._settings import RunSettings
from afflux.rules import ca2fl, fedavg, fedbuff
from conftest import check_error, check_raises
from core_runs import MODEL, Echo, looped, one_round, replied, run_of, trained


class Other(Echo):
    name = "other"


def test_the_notes_are_stored_before_the_first_step(tmp_path):
    class Interrupted(Echo):
        name = "first"

        def send(self, address, task):
            raise KeyboardInterrupt

    run = run_of(store=tmp_path / "store")
    loop = Loop(run, Interrupted())
    check_raises(KeyboardInterrupt, loop.run, 3)
    run.server.close(checkpoint=False)  # killed
    check_error("of a run of 'first', and this one is of other", looped, Other(), 3, store=tmp_path / "store")


def test_metrics_outlive_an_interrupt(tmp_path):
    class Interrupted(Echo):
        def step_done(self, step, metrics):
            super().step_done(step, metrics)
            if step == 5:
                self.read = self.interrupt  # before the next reply is taken in

        def interrupt(self):
            raise KeyboardInterrupt

    transport = Interrupted()
    check_raises(KeyboardInterrupt, looped, transport, 9, store=tmp_path / "store", checkpoint_every=100)
    again = Echo()
    looped(again, 9, store=tmp_path / "store")
    assert again.told == {"steps": [[step, 2] for step in range(1, 6)]}
    assert [step for step, _ in again.steps] == [6, 7, 8, 9]


def test_a_store_goes_on_with_its_own_adapter(tmp_path):
    class Named(Echo):
        name = "named"

    for transport in (Echo(), Named(), Named()):  # a store without a name is any adapter's
        looped(transport, 3, store=tmp_path / "store")
    check_error("the store is of a run of 'named', and this", looped, Other(), 3, store=tmp_path / "store")
    Server.open(tmp_path / "store").close()


def test_notes_that_cannot_be_made_leave_no_lock(tmp_path):
    class NoNotes(Echo):
        def notes(self):
            raise TypeError("no notes")

    check_error("no notes", looped, NoNotes(), 3, store=tmp_path / "store", error=TypeError)
    Server.open(tmp_path / "store").close()


def test_a_start_that_fails_leaves_no_lock(tmp_path):
    store = tmp_path / "store"
    run = run_of(ca2fl(buffer_size=2), store=store)
    one_round(run, [1, 2])
    run.close({"epoch": 3})

    class Strict(Echo):
        schema = dict[str, list[int]]

    check_error("notes are not those of this adapter", looped, Strict(), 3, ca2fl(buffer_size=2), store=store)
    strangers = Echo(clients=(8, 9))
    check_error("none of the 2 clients that are there", looped, strangers, 3, ca2fl(buffer_size=2), store=store)
    with pytest.raises(AffluxError, match="another model"):
        TrainingRun(ca2fl(buffer_size=2), {"w": MODEL["w"]}, RunSettings(store=store), num_clients=2)
    Server.open(store).close()


def test_a_store_for_fewer_clients_at_the_same_time_is_warned_of(tmp_path, caplog):
    for concurrency in (62, 65):
        assert not caplog.messages
        run_of(store=tmp_path / "store", concurrency=concurrency).close()
    (line,) = caplog.messages
    assert line.startswith("The store was made for fewer than 65 clients at the same time")


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


def test_the_arrays_of_a_store_may_come_in_another_order(tmp_path):
    def run(arrays, steps):
        run = TrainingRun(fedbuff(buffer_size=1), arrays, RunSettings(store=tmp_path / "store"), num_clients=1)
        for _ in range(steps):
            assert replied(run, 1).status == "joined"
        version = run.versions.of(run.server.pull())
        run.close({})
        return version

    first = run(MODEL, 1)
    second = run(dict(reversed(MODEL.items())), 1)
    assert [*second] == ["b", "w"]
    for name in MODEL:
        assert first[name].shape == second[name].shape == MODEL[name].shape
        assert second[name].tobytes() == first[name].tobytes()  # the reply is the same model
    other = {"w": MODEL["w"], "b": MODEL["b"][:3]}
    check_error(r"another model: 'b' is an array of shape \(4,\) there, and an .*\(3,\) in", run, other, 0)
    check_error(r"'c' is no array of this name there, and an array of shape \(4,\)", run, {**MODEL, "c": MODEL["b"]}, 0)


def test_a_resumed_run_applies_its_options_and_refuses_what_cannot_change(tmp_path, caplog):
    """A restart with max_norm because a client has turned hostile; roles and log= of a store cannot change."""
    first = {"roles": {"b": "local"}, "server_options": {"max_staleness": 4, "facts": ("tokens",)}}
    run = run_of(fedavg(buffer_size=2), store=tmp_path / "store", **first)
    for client in (1, 2):
        replied(run, client, lambda: trained(num_examples=1))
    run.close({})
    for value, status in ((20.0, "faulty"), (1.0, "joined")):
        run = run_of(fedavg(buffer_size=2), store=tmp_path / "store", server_options={"max_norm": 9.0})
        assert replied(run, 1, lambda value=value: trained(value, num_examples=1)).status == status
        assert (run.server.options.max_norm, run.server.options.max_staleness) == (9.0, 4)
        run.close({})
    assert [line for line in caplog.messages if line.startswith("[open]")] == [
        f"[open] {tmp_path / 'store'}: from version 1 on, max_norm is 9.0, not None"
    ]
    caplog.clear()
    run_of(fedavg(buffer_size=2), store=tmp_path / "store", **first).close()
    for settings, both in (
        ({"roles": {"*": "trained"}}, r"'b' has the role 'trained' by roles=, and 'local' in "),
        ({"roles": {"[wb]": "local"}}, r"'w' has the role 'local' by roles=, and 'trained' in "),
        ({"server_options": {"log": True}}, r"\[open\] log is True, and False in the store"),
        ({"server_options": {"facts": ("rows",)}}, r"facts is \('rows', .*, and \('tokens', .* in the store"),
    ):
        check_error(both, run_of, fedavg(buffer_size=2), store=tmp_path / "store", **settings)
    assert not caplog.messages
    Server.open(tmp_path / "store").close()
