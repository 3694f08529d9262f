"""`Server.open_or_create`: one call for the first start of a program and for each later one."""

import logging

import numpy as np
import pytest

from afflux import AffluxError, Layout, Server, StoreError
from afflux.rules import ca2fl, fedavg, fedbuff
from afflux.server import persistence
from conftest import FORKS, bits, check_error, check_raises, raising

pytestmark = pytest.mark.filterwarnings(FORKS)

RULE = ca2fl(buffer_size=2)


def model(**other):
    arrays = {"w": np.ones((4, 5), np.float32), "bn": {"running_mean": np.zeros(5, np.float32)}}
    return arrays | other


def opened(path, rule=RULE, params=None, **options):
    return Server.open_or_create(path, rule, model() if params is None else params, **({"num_clients": 9} | options))


def some_pushes(server, start, stop):
    for client in range(start, stop):
        mean = {"bn": {"running_mean": np.full(5, client, np.float32)}}
        update = {"w": np.full((4, 5), client + 1, np.float32)}
        server.push(client=client % 9, version=server.version, update=update, buffers=mean)


def files(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_each_start_continues_with_the_bits_of_one_server(tmp_path):
    """Also with an arrival that waits; initial values count in the first start only."""
    whole = Server(RULE, model(), num_clients=9)
    some_pushes(whole, 0, 13)
    for start, value in ((0, 1), (5, 7), (10, np.nan)):
        with opened(tmp_path / "store", params=model(w=np.full((4, 5), value, np.float32))) as server:
            assert server.joins == start
            some_pushes(server, start, min(start + 5, 13))
    with opened(tmp_path / "store") as server:
        assert (server.version, server.arrivals_waiting) == (6, 1)
        assert bits(server.params) == bits(whole.params)
        assert bits(server.pull().buffers) == bits(whole.pull().buffers)


@pytest.mark.parametrize(
    ("rule", "params", "message"),
    [
        (fedbuff(buffer_size=2), None, r"\[open\] .* holds a server whose rule is 'ca2fl', not 'fedbuff'$"),
        (RULE, np.zeros(20), r"another model: w is trained of shape \(4, 5\) in the store, absent in params$"),
        (RULE, model(w=np.ones((4, 6))), r"another model: w has shape \(4, 5\) in the store, \(4, 6\) in params$"),
        (RULE, {"w": np.ones((4, 5))}, r"bn.running_mean is statistic float32 of shape \(5,\) in the store, absent"),
        (RULE, model(v=np.ones(3)), r"another model: v is absent in the store, trained of shape \(3,\) in params$"),
        (RULE, {"v": np.ones(3), **model()}, "another model: v is absent in the store"),
    ],
    ids=["rule", "flat", "shape", "fewer", "more", "before"],
)
def test_another_rule_or_model_is_refused_by_name(tmp_path, caplog, rule, params, message):
    with opened(tmp_path / "store") as server:
        some_pushes(server, 0, 3)
    before = files(tmp_path / "store")
    with caplog.at_level(logging.INFO, "afflux"):
        check_error(message, opened, tmp_path / "store", rule, params, error=StoreError)
    assert caplog.text == ""
    assert files(tmp_path / "store") == before
    with opened(tmp_path / "store") as server:
        assert server.joins == 3


def test_other_roles_are_another_model(tmp_path):
    local = Layout.of(model(), roles={"bn.*": "local"})
    opened(tmp_path / "store", layout=local).close()
    message = "bn.running_mean is local float32 .* in the store, statistic float32 .* in params"
    check_error(message, opened, tmp_path / "store", error=StoreError)
    with opened(tmp_path / "store", layout=local) as server:
        assert server.layout.roles["bn.running_mean"] == "local"


def test_arrays_in_another_order_are_another_model(tmp_path):
    opened(tmp_path / "store", params=[np.zeros(2), np.zeros(2)]).close()
    opened(tmp_path / "store", params=[np.ones(2), np.ones(2)]).close()
    opened(tmp_path / "named", params={"a": np.zeros(2), "b": np.zeros(2)}).close()
    turned = {"b": np.zeros(2), "a": np.zeros(2)}
    check_error("have another order than those of params$", opened, tmp_path / "named", params=turned, error=StoreError)


def test_vectors_are_compared_by_their_length(tmp_path):
    opened(tmp_path / "store", params=np.zeros(20)).close()
    message = r"params has shape \(20,\) in the store, \(21,\) in params"
    check_error(message, opened, tmp_path / "store", params=np.zeros(21), error=StoreError)
    opened(tmp_path / "store", params=np.ones(20)).close()


def test_options_are_those_of_open(tmp_path, caplog):
    opened(tmp_path / "store", max_staleness=3, log=True).close()
    with opened(tmp_path / "store", max_staleness=5) as server:  # an option that is not given has its stored value
        assert (server.options.max_staleness, server.options.log) == (5, True)
    assert "max_staleness" in caplog.text
    check_error("num_clients is 8, and 9 in the store", opened, tmp_path / "store", num_clients=8)
    check_error("no_option", opened, tmp_path / "store", no_option=1)
    with opened(tmp_path / "store", ca2fl(buffer_size=2, server_lr=0.5)) as server:
        assert server.rule == ca2fl(buffer_size=2, server_lr=0.5)
    assert "the rule that was given changes" in caplog.text


def test_folders_that_are_no_store_stay_as_they_are(tmp_path):
    (tmp_path / "store").mkdir()
    opened(tmp_path / "store").close()  # an empty folder is taken
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    check_error("is not empty, and holds no store", opened, tmp_path / "other", error=StoreError)
    assert files(tmp_path / "other") == {tmp_path / "other" / "notes.txt": b"mine"}
    check_error("path is 3", opened, 3)
    check_error("rule is 'fedbuff'", opened, tmp_path / "new", "fedbuff")
    assert not (tmp_path / "new").exists()


def test_a_store_in_use_is_refused(tmp_path):
    with opened(tmp_path / "store"):
        check_error("in use|open", opened, tmp_path / "store", error=StoreError)


def test_a_store_that_an_end_has_left_without_a_server_is_made_again(tmp_path, monkeypatch):
    """As SIGKILL does between the index and the first commit: no handler removes the files."""

    with monkeypatch.context() as patch:
        patch.setattr(persistence, "_move_to", raising(KeyboardInterrupt))
        patch.setattr(persistence, "remove_contents", lambda path: None)
        patch.setattr("afflux.store.store.remove_contents", lambda path: None)
        check_raises(KeyboardInterrupt, opened, tmp_path / "store")
    check_error("holds no server", Server.open, tmp_path / "store", error=StoreError)
    with opened(tmp_path / "store") as server:
        some_pushes(server, 0, 4)
    with opened(tmp_path / "store") as server:
        assert server.version == 2


def test_trees_are_in_the_library_of_params_in_each_start(tmp_path):
    import torch

    def net():
        layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
        layers.register_buffer("order", torch.arange(5))
        return layers

    trees = []
    for _ in range(2):
        with opened(tmp_path / "store", fedavg(buffer_size=1), net()) as server:
            task = server.checkout("ann")
            trees.append(task.tree())
            task.load(net())
            server.push(task=task, model=net())
    first, second = ({name: (type(value), value.dtype) for name, value in tree.items()} for tree in trees)
    assert first == second
    assert first["0.weight"] == (torch.Tensor, torch.bfloat16)
    assert [tree["order"].tolist() for tree in trees] == [[0, 1, 2, 3, 4]] * 2


def test_arguments_are_checked_before_anything_is_made(tmp_path):
    for wrong in ({"num_threads": 0}, {"push_threads": 0}, {"on_step": 3}, {"layout": 3}, {"plane": 3}):
        check_error(next(iter(wrong)), opened, tmp_path / "store", **wrong)
    assert not (tmp_path / "store").exists()
    opened(tmp_path / "store").close()
    before = files(tmp_path / "store")
    for wrong in ({"num_threads": 0}, {"push_threads": 0}, {"on_step": 3}, {"layout": 3}, {"plane": 3}):
        assert isinstance(check_error(next(iter(wrong)), opened, tmp_path / "store", **wrong), AffluxError)
    assert files(tmp_path / "store") == before
