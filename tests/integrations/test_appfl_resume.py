"""APPFL's aggregator goes on from a store."""

from contextlib import closing, nullcontext

import pytest

from appfl_here import Lines, aggregator, counted, moved, params


def test_models_of_another_run_do_not_join(tmp_path):
    own = aggregator(store=tmp_path / "store")
    first = own.get_parameters()
    own.aggregate("a", moved(first, 1.0), round=1)
    held = {client: own.get_parameters(client_id=client) for client in ("b", "c")}
    own.run.checkpoint({"metrics": {}})
    own.server.close(checkpoint=False)  # as if the process had ended
    own = aggregator(store=tmp_path / "store")
    assert own.server.tasks == ()
    before = params(own)
    own.get_parameters()  # of a client that starts again
    for client, model in held.items():
        own.aggregate(client, moved(model, 1.0), round=1)
    assert counted(own) == {"joined": 1, "unknown": 2}
    assert params(own) == before
    for client in held:  # from now on they train for this run
        own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0), round=2)
    assert counted(own) == {"joined": 3, "unknown": 2}
    own.close()


def test_a_store_goes_on_and_knows_its_own(tmp_path):
    configs = {"rule": "ca2fl", "store": str(tmp_path / "store"), "checkpoint_every": 1}
    first = aggregator(**configs)
    held = {client: first.get_parameters(client_id=client) for client in "ab"}
    for client in "ab":
        first.aggregate(client, moved(held[client], 1.0), val_loss=2.0)
    first.aggregate("a", moved(held["a"], 3.0))
    first.close()
    second = aggregator(**configs)
    assert second.server.version == 1
    assert second.server.arrivals_waiting == 1
    assert second.metrics == {1: {"val_loss": 2.0}}
    assert len(second.server.rows) == 2
    second.close()


def test_a_store_of_other_clients_ends_the_run_and_names_them(tmp_path):
    """The rule has room for its own clients alone: none of these may train."""
    for clients, message in ((("ann", "ben"), None), (("cleo", "dan"), "none of 2 clients may train.*num_clients=2")):
        own = aggregator(rule="ca2fl", num_clients=2, store=tmp_path / "store", logger=(lines := Lines()))
        with closing(own), pytest.raises(RuntimeError, match=message) if message else nullcontext():
            for client in (*clients, *clients):
                own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0))
    assert len([line for line in lines if "No task goes to client" in line]) == 2
    assert own.counts["faulty"] == 2
