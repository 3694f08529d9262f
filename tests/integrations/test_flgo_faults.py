"""What FLGo's clients send, whatever it is: packages of no use, late, lost and repeated."""

import warnings

import numpy as np
import pytest

import flgo_points  # noqa: F401  # first: it skips these tests where FLGo is not installed
from afflux.integrations import flgo as adapter
from afflux.integrations.flgo import BasicClient, algorithm
from afflux.rules import fedbuff
from conftest import check_error
from flgo_runs import flat, in_a_folder, simulator, started  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # FLGo's and torch's own


def bad(kind):
    """The class of clients whose second one sends what is of no use."""

    class Client(BasicClient):
        def reply(self, package):
            reply = super().reply(package)
            if self.id != 1:
                return reply
            model = reply["model"]
            if kind == "nothing":
                return None
            if kind == "text":
                return "model"
            if kind == "empty":
                return {}
            if kind == "none":
                reply["model"] = None
            elif kind == "number":
                reply["model"] = 3.5
            elif kind == "nan":
                model.model.b.data[2] = float("nan")
            elif kind == "examples":
                reply["num_examples"] = "many"
            return reply

    return Client


@pytest.fixture(scope="module")
def alone():
    """The params that one client makes alone in six rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = started(algorithm(fedbuff(buffer_size=1)), clients=1)
        runner.run()
    return runner.server.params.tobytes()


def test_a_model_may_have_a_state_dict_without_arguments(alone):
    class Client(BasicClient):
        def reply(self, package):
            reply = super().reply(package)
            state = reply["model"].state_dict()
            reply["model"].state_dict = lambda: state
            return reply

    runner = started(algorithm(fedbuff(buffer_size=1), client=Client), clients=1)
    runner.run()
    assert runner.server.params.tobytes() == alone


@pytest.mark.parametrize("kind", ["nothing", "text", "empty", "none", "number", "nan", "examples"])
def test_a_package_that_is_of_no_use_changes_nothing_but_a_count(kind, alone):
    runner = started(algorithm(fedbuff(buffer_size=1), client=bad(kind), max_failures=10**6), clients=2)
    runner.run()
    assert runner.server.params.tobytes() == flat(runner.model).tobytes() == alone
    counts = {**runner.server.counts, **runner.lost}
    assert counts.pop("faulty") > 0
    assert counts.pop("joined") == 6
    assert not any(counts.values())
    assert runner.server.faults[0].client_id == 1
    assert runner.server.faults[0].reason


def test_a_client_that_is_drawn_alone_and_always_fails_ends_the_run():
    """The buffer needs both clients, and FLGo draws no client again whose model is in it."""
    runner = started(algorithm(fedbuff(buffer_size=2), client=bad("nan"), max_failures=4), clients=2)
    check_error(r"none of 1 clients is of use: each has failed 4 times in a row", runner.run, error=RuntimeError)


def test_packages_that_are_late_lost_or_repeated(alone):
    late = simulator(latencies=(3, 50))
    runner = started(algorithm(fedbuff(buffer_size=1), timeout=20), clients=2, simulator=late, num_rounds=40)
    runner.run()
    assert runner.lost["overdue"] >= 2
    assert runner.lost["unknown"] >= 1
    assert runner.server.counts["joined"] == 40
    assert not runner.server.tasks

    repeated = algorithm(fedbuff(buffer_size=1))
    handle = repeated.Server.package_handler
    repeated.Server.package_handler = lambda self, received: handle(
        self, {name: [*values, *values] for name, values in received.items()}
    )
    runner = started(repeated, clients=1)
    runner.run()
    assert runner.server.params.tobytes() == alone
    assert runner.lost["unknown"] >= 6 - 1  # the last one of a run may be left

    # One client at a time: the place of a client that drops out is free again.
    lost = simulator(drops=(1,))
    runner = started(algorithm(fedbuff(buffer_size=1)), clients=2, simulator=lost, proportion=0.5)
    runner.run()
    assert runner.server.params.tobytes() == alone
    counts = {**runner.server.counts, **runner.lost}
    assert counts.pop("failed") > 0
    assert sum(counts.values()) == 6


def test_clients_that_all_drop_out_end_the_run():
    lost = simulator(drops=(0, 1))
    runner = started(algorithm(fedbuff(buffer_size=1), max_failures=3), clients=2, simulator=lost)
    check_error(r"none of 2 clients is of use: .* failed 3 times.*it has dropped out", runner.run, error=RuntimeError)
    assert runner.lost["failed"] >= 6


def test_clients_that_are_all_too_late_end_the_run():
    runner = started(algorithm(fedbuff(buffer_size=2), timeout=2, max_failures=3), clients=2)
    check_error(r"none of 2 clients is of use: .* no reply within 2 s", runner.run, error=RuntimeError)


@pytest.mark.parametrize("timeout", [None, 20])
@pytest.mark.parametrize("first", [0, 3])
def test_a_run_whose_clients_have_left_ends(first, timeout, monkeypatch):
    """At the start, and with the models of the first clients in a buffer that no other client fills."""

    class Left(simulator()):
        def update_client_availability(self):
            there = [float(client < first and self.gv.clock.current_time < 99) for client in self.all_clients]
            self.set_variable(self.all_clients, "prob_available", there)
            self.set_variable(self.all_clients, "prob_unavailable", [1.0 - each for each in there])

    monkeypatch.setattr(adapter, "_MOST_IDLE", 200)
    runner = started(algorithm(fedbuff(buffer_size=6), timeout=timeout), simulator=Left, sample="uniform_available")
    check_error(rf"no client has trained for 200 moments .* apart from {first} whose", runner.run, error=RuntimeError)
    assert runner.server.version == 0
    assert runner.lost["overdue"] == 0


def test_versions_and_tasks_are_bounded():
    """10,000 packages, of which 1 per cent never come."""
    runner = started(algorithm(fedbuff(buffer_size=10), timeout=30), clients=16)
    rng, held, opened, under_way = np.random.default_rng(0), [], [], []
    for _ in range(10_000):
        while len(under_way) < 12:
            client = int(rng.integers(16))
            under_way.append((client, runner.open_task(client)))
        client, key = under_way.pop(rng.integers(len(under_way)))
        if rng.random() >= 0.01:
            runner.package_handler({"model": [runner.model], "__cid": [client], adapter.TASK: [key]})
        runner.gv.clock.time += 1
        runner.training.expire()
        held.append(runner.server.versions_held)
        opened.append(len(runner.server.tasks))
    assert runner.server.version == runner.server.counts["joined"] // 10 > 900
    assert runner.lost["overdue"] > 50
    assert max(opened) <= 45
    assert max(held) <= 12
