"""Which version a client of APPFL has trained from, and models that come late or twice."""

import numpy as np
import pytest
import torch
from appfl.algorithm.scheduler import AsyncScheduler
from omegaconf import OmegaConf

from appfl_here import Net, aggregator, counted, flat, moved, params
from core_runs import Clock


def two_steps(own):
    """Makes two steps with clients of their own."""
    for _ in range(2):
        for client in ("x", "y"):
            own.aggregate(client, moved(own.get_parameters(client_id=client, init_model=False), 1.0))
    assert own.server.version == 2


def last_join(own):
    return [entry for entry in own.server.log if hasattr(entry, "staleness")][-1]


@pytest.mark.parametrize("given", [{}, {"serial_run": True}, {"init_model": True, "num_batched_clients": 4}])
def test_a_first_model_is_taken_against_what_was_sent_without_an_id(given):
    """gRPC, MPI and serial runs ask for it so."""
    own = aggregator(server_options={"log": True}, num_clients=9)
    first = own.get_parameters(**given)
    two_steps(own)
    for client in ("a", "b"):
        own.aggregate(client, moved(first, 1.0), round=1)
    last = last_join(own)
    assert (last.client_id, last.version, last.staleness) == ("b", 0, 2)
    weight = 1 / np.sqrt(3)  # of staleness 2, the mean of two equal ones
    assert flat(own.get_parameters()) == pytest.approx(flat(first) + 2 + weight, abs=1e-5)
    own.aggregate("a", moved(first, 1.0), round=2)  # its second one is of what the first has returned
    assert last_join(own).version == 2


def test_what_was_sent_without_an_id_counts_while_it_is_one_version():
    own = aggregator(num_clients=9)
    first = own.get_parameters()
    two_steps(own)
    own.get_parameters(init_model=False)  # no client trains from it
    own.aggregate("a", moved(first, 1.0))
    assert counted(own) == {"joined": 5}
    later = own.get_parameters()  # another client that is not known: which one has which?
    for client, model in (("b", first), ("c", later)):
        before = params(own)
        own.aggregate(client, moved(model, 1.0))
        assert params(own) == before
    assert counted(own) == {"joined": 5, "unknown": 2}
    own.aggregate("b", moved(later, 1.5))
    assert counted(own) == {"joined": 6, "unknown": 2}


def test_same_init_model_sends_one_version_to_all():
    """The scheduler asks once for all, with what the last client says."""
    own = aggregator(num_clients=3)
    scheduler = AsyncScheduler(OmegaConf.create({"num_clients": 3, "optimize_memory": False}), own, None)
    futures = [scheduler.get_parameters(init_model=True, client_id=client) for client in "abc"]
    models = [future.result() for future in futures]
    for client, model in zip("abc", models, strict=True):
        scheduler.schedule(client, moved(model, 1.0), round=1)
    assert counted(own) == {"joined": 3}
    assert scheduler.get_num_global_epochs() == 3  # models of this run, not steps


def test_a_client_that_has_trained_for_another_server_is_not_new():
    own = aggregator()
    held = own.get_parameters()
    own.aggregate("old", moved(held, 1.0), round=7)
    assert counted(own) == {"unknown": 1}


def test_a_client_that_starts_again_without_its_id_is_not_taken_against_its_last_version():
    own = aggregator(num_clients=9)
    held = own.get_parameters(client_id="a")
    for count in (1, 2, 3):
        held = own.aggregate("a", moved(held, 1.0), round=count)
    own.aggregate("a", moved(own.get_parameters(), 9.0), round=1)
    assert counted(own) == {"joined": 3, "unknown": 1}
    own.get_parameters(client_id="a", init_model=False)
    own.aggregate("a", moved(held, 1.0), round=1)
    assert counted(own) == {"joined": 4, "unknown": 1}


def test_a_late_model_has_no_effect_and_its_client_goes_on():
    own = aggregator(timeout=10.0)
    own.run.clock = clock = Clock()
    held, without = own.get_parameters(client_id="a"), own.get_parameters()
    clock.now += 11
    before = params(own)
    fresh = own.aggregate("a", moved(held, 1.0))
    own.aggregate("b", moved(without, 1.0))
    assert params(own) == before
    assert counted(own) == {"expired": 1, "unknown": 1}
    own.aggregate("a", moved(fresh, 2.0))
    assert own.counts["joined"] == 1


def test_a_client_whose_time_is_over_is_not_taken_for_a_new_one():
    own = aggregator(num_clients=9, timeout=10.0)
    own.run.clock = clock = Clock()
    held = own.get_parameters(client_id="a", init_model=False)
    clock.now += 11
    two_steps(own)
    own.get_parameters()  # of another client
    own.aggregate("a", moved(held, 1.0), round=1)
    assert own.counts["unknown"] == 1
    assert own.counts["joined"] == 4


class Partly(torch.nn.Module):
    """Of which the first, the middle and the last array are frozen."""

    def __init__(self):
        super().__init__()
        for name in "abcde":
            setattr(self, name, torch.nn.Parameter(torch.zeros(3), requires_grad=name in "bd"))


@pytest.mark.parametrize("rounds", [True, False])
def test_trainings_that_look_the_same_are_no_duplicates(rounds):
    """Of arrays that are frozen, of rows of an embedding, and of no change at all."""

    def trained(model, count, kind):
        model = {name: array.clone() for name, array in model.items()}
        if kind == "frozen":
            model["b"] += 1
        elif kind == "sparse":
            model["w"][count * 7 + 3] += 1
        return model

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1000, 8))

    for kind, net in (("frozen", Partly()), ("sparse", Rows()), ("unchanged", Net())):
        own = aggregator(net, K=1)
        held = own.get_parameters(client_id=1)
        for count in range(5):
            report = {"round": count + 1} if rounds else {}
            held = own.aggregate(1, trained(held, count, kind), **report)
        assert counted(own) == {"joined": 5}
        assert own.server.version == 5


def test_a_model_that_comes_twice_counts_once():
    report = {"round": 3, "val_loss": 0.5}
    own = aggregator(K=3)
    held = own.get_parameters(client_id="a")
    sent = moved(held, 1.0)
    answer = own.aggregate("a", sent, **report)
    again = own.aggregate("a", {name: array.clone() for name, array in sent.items()}, **report)
    assert flat(again).tobytes() == flat(answer).tobytes()
    assert counted(own) == {"joined": 1, "unknown": 1}
    own.aggregate("b", moved(own.get_parameters(client_id="b"), 1.0))
    own.aggregate("c", moved(own.get_parameters(client_id="c"), 1.0))
    assert own.server.version == 1
    late = own.aggregate("a", sent, **report)  # what it trains from is what it was sent, not the newest
    assert flat(late).tobytes() == flat(answer).tobytes()
    own.aggregate("a", moved(answer, 1.5), **report)
    assert counted(own) == {"joined": 4, "unknown": 2}
    for _ in range(2):  # two trainings with one result, because each was sent a model
        own.get_parameters(client_id="d")
        own.aggregate("d", sent, **report)
    assert counted(own) == {"joined": 6, "unknown": 2}
