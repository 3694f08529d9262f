"""Tasks hold versions within bounds, and neither errors nor interrupts leave one held or lost."""

import pickle
import threading
import time
from functools import partial

import numpy as np

from afflux import AffluxError, Server
from afflux.rules import fedavg
from afflux.server.inputs import InputAdapter
from checked_out import D, held, made, step, vector
from conftest import check_error
from held_up import start
from inside import slots_taken


def test_a_push_that_completes_a_round_does_not_hold_its_own_base():
    server = made(max_versions=2)
    for turn in range(5):
        task = server.checkout(turn)
        step(server)  # there is no third version
        assert server.push(task=task.id, model=vector(turn)).status == "joined"


def test_a_step_waits_for_a_push_that_reads_the_last_free_version(monkeypatch):
    server = made(max_versions=2)
    task, waited = server.checkout(1), []
    ingest = InputAdapter.ingest

    def slow(self, what, parts, slot, conversion=None, *others):
        if conversion is not None and not waited:
            thread = threading.Thread(target=lambda: waited.append(server.push(client=2, version=1, update=vector())))
            step(server)
            thread.start()
            time.sleep(0.3)
            waited.append(server.version)
            result = ingest(self, what, parts, slot, conversion, *others)
            waited.append(thread)
            return result
        return ingest(self, what, parts, slot, conversion, *others)

    monkeypatch.setattr(InputAdapter, "ingest", slow)
    assert server.push(task=task, model=vector()).status == "joined"
    version, thread, *_ = [each for each in waited if not isinstance(each, tuple)]
    thread.join(600)
    assert version == 1, "the second step had no version to write into"
    assert server.version == 3


def test_threads_with_few_slots_and_few_versions_end():
    """A push that waits for a slot holds no version, for which the step that frees the slot would wait."""
    server = made(preset=fedavg(buffer_size=2), max_slots=2, max_versions=2)
    joined = []

    def client(number):
        for _ in range(60):
            receipt = server.push(task=server.checkout(number), model=vector(number), timeout=20)
            joined.append(receipt.status)

    clients = [start(partial(client, number)) for number in range(4)]
    assert [each.result(600) for each in clients] == [None] * 4
    assert len(joined) == 240
    assert set(joined) <= {"joined", "expired"}
    assert server.version > 0


def test_bases_that_a_checkpoint_keeps_leave_room_for_steps(tmp_path):
    for most in (3, 4, 6):
        server = made(max_versions=most, store=tmp_path / f"s{most}")
        for _ in range(3):
            tasks = [server.checkout(client) for client in range(3)]
            step(server)
            tasks.append(server.checkout(3))
            server.checkpoint()
            step(server, 6)
        server.close()
        with Server.open(tmp_path / f"s{most}") as server:
            assert len(server.tasks) == 12
            step(server, 6)


def test_a_step_that_fails_anyway_takes_no_base():
    server = made(max_versions=3)
    mine = [server.pull()]
    step(server)
    mine.append(server.pull())
    task = server.checkout(1)
    step(server)
    check_error("all 3 .*max_versions", step, server)
    assert held(server, task)
    mine.clear()
    step(server)


def test_a_version_that_the_caller_keeps_outlives_a_task_on_it(tmp_path):
    server = made(store=tmp_path / "s")
    pulled, task = server.pull(), server.checkout(1)
    step(server)
    server.checkpoint(keep=[pulled])
    server.close()
    with Server.open(tmp_path / "s") as server:
        assert [*server.retained_versions] == [0]
        server.tasks[0].cancel()
    with Server.open(tmp_path / "s") as server:
        assert server.retained_versions[0].params.tolist() == [0.0] * D
        assert task.id not in {each.id for each in server.tasks}


def test_a_loaded_state_closes_tasks():
    """Versions have numbers, and those of another past have the same ones. Those of tasks leave room for the load."""
    server = made(max_versions=2)
    state = server.state_dict()
    step(server)
    task = server.checkout(1)
    server.load_state_dict(state)
    server.push(client=0, version=0, update=vector(20.0))
    assert server.push(task=task, model=vector(1.0)).status == "expired"
    assert server.tasks == ()


def test_stored_errors_hold_neither_slots_nor_versions():
    server, errors = made(max_slots=2, max_versions=3), []
    for turn in range(6):
        task = server.checkout(turn)
        for model in (vector(np.nan), np.ones(2 * D, np.complex64)[::2], np.ones(D, np.int32)):
            try:
                server.push(task=task, model=model, timeout=0)
            except AffluxError as error:
                errors.append(error)
        step(server)
    assert len(errors) == 18
    assert slots_taken(server) == 0


def test_tasks_are_equal_by_their_ids_and_not_pickled_nor_is_a_server():
    server = made()
    task = server.checkout(1)
    assert task in server.tasks
    assert len({task, *server.tasks}) == 1
    check_error("a task is not pickled: send its id", pickle.dumps, task)
    text = r"^\[Server\] a server is not pickled: save its state_dict\(\)"
    check_error(text, pickle.dumps, server, error=ValueError)
