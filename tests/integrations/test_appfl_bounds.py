"""Memory and places of APPFL's aggregator over many models, invented ids and threads."""

import threading

import numpy as np

from appfl_here import aggregator, counted, moved
from core_runs import Clock


def test_new_ids_without_end_take_no_memory():
    own = aggregator(num_clients=20, K=10, server_options={"max_versions": 8})
    held = own.get_parameters(client_id="good")
    good = own.aggregate("good", moved(held, 1.0))
    first = own.get_parameters()
    for number in range(3000):
        own.set_client_sample_size(f"sized {number}", 3)
        model = own.get_parameters(client_id=f"asks {number}", init_model=False)
        own.aggregate(f"first {number}", moved(first, 1.0))
        if number % 3 == 0:
            own.aggregate(f"asks {number}", moved(model, float("nan")))
        if number % 10 == 0:
            good = own.aggregate("good", moved(good, 1.0))
    assert len(own.server.tasks) == len(own.run.assignments) <= 40
    assert own.server.versions_held <= 8
    clients = own._clients
    for kept in (clients._seen, clients._known, own.run.clients._failures, own.run.clients._ids):
        assert len(kept) <= 40
    joined = own.counts["joined"]
    own.aggregate("good", moved(good, 1.0))
    assert own.counts["joined"] == joined + 1


def test_invented_ids_take_no_place_of_a_client():
    """Neither of one whose model has joined, nor of one that comes later."""
    own = aggregator(rule="fedavg", K=100, num_clients=4, client_weights_mode="sample_size")
    own.set_client_sample_size("early", 10)
    early = own.aggregate("early", moved(own.get_parameters(client_id="early"), 1.0))
    for number in range(50):
        own.set_client_sample_size(f"invented {number}", 3)
        own.aggregate(f"invented {number}", {})
    assert len(own.run.assignments) == 8
    before = own.counts["unknown"]
    own.set_client_sample_size("late", 10)
    late = own.get_parameters(client_id="late")
    for client, model in (("early", early), ("late", late)):
        own.aggregate(client, moved(model, 1.0))
    assert own.counts["unknown"] == before
    assert own.counts["joined"] == 3
    assert len(own.run.assignments) == len(own._clients._known) == 8


def test_clients_whose_time_is_over_give_way_to_others():
    own = aggregator(num_clients=4, timeout=10.0, K=100)
    own.run.clock = clock = Clock()
    for client in range(8):
        own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0))
    clock.now += 11
    held = {f"new {client}": own.get_parameters(client_id=f"new {client}") for client in range(8)}
    assert len(own.run.assignments) == 8
    assert own.counts["overdue"] == 8
    for client, model in held.items():
        own.aggregate(client, moved(model, 1.0))
    assert own.counts["joined"] == 16
    assert own.counts["unknown"] == 0


def test_versions_are_bounded_over_many_models():
    own = aggregator(num_clients=50, K=5)
    held = {client: own.get_parameters(client_id=client) for client in range(50)}
    rng, most = np.random.default_rng(0), 0
    for step in range(10_000):
        client = int(rng.integers(50)) if step % 100 else int(rng.integers(10**9, 10**10))
        held[client % 50] = own.aggregate(client, moved(held[client % 50], 0.001), round=step)
        most = max(most, own.server.versions_held)
    assert own.counts["joined"] == 9_900
    assert own.counts["unknown"] == 100
    assert most <= 64
    assert len(own.metrics) == 1000


def test_threads_may_call_at_the_same_time():
    """As in APPFL's gRPC server: only `aggregate` is inside the scheduler's lock."""
    own = aggregator(num_clients=8, K=3)
    failed = []

    def client(name):
        try:
            held = own.get_parameters(client_id=name)
            own.set_client_sample_size(name, 5)
            for count in range(50):
                held = own.aggregate(name, moved(held, 0.5), round=count + 1)
                own.get_parameters(init_model=False)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert counted(own) == {"joined": 400}


def test_a_client_that_waits_for_the_step_of_another_one_is_not_late():
    own = aggregator(K=1, num_clients=2, timeout=10.0)
    own.run.clock, push = Clock(), own.server.push
    models = {client: own.get_parameters(client_id=client) for client in ("ann", "bob")}

    def slow(**reply):
        own.run.clock.now += 100.0
        return push(**reply)

    own.server.push = slow
    for client, model in models.items():
        own.aggregate(client, moved(model, 1.0))
    assert counted(own) == {"joined": 2}
