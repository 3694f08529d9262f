"""A store holds what a server without one has in memory, bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from afflux import Server, StoreError, UnavailableError, replay
from afflux.ops.codecs import ROUNDING
from afflux.rules import ca2fl, fedbuff, wkafl
from conftest import FORKS, bits, check_error, push_all
from crashes import result
from stores import CLIENTS, M, made, same, some_pushes

pytestmark = pytest.mark.filterwarnings(FORKS)


@pytest.mark.parametrize("codec", ["float32", *(codec.name for codec in ROUNDING)])
@pytest.mark.parametrize("name", ["ca2fl", "mf_ca2fl", "afa_cs"])
def test_every_codec_has_the_bits_of_memory(name, codec, tmp_path, mapped):
    """Of one seed, kept in the folder; with an arrival that waits at the end, whose extremes the next round needs."""
    size, path = 2 * 2048 + 77, tmp_path / "store"
    there, here = made(name, size, path, codec=codec, seed=5), made(name, size, codec=codec, seed=5)
    for server in (there, here):
        some_pushes(server, size, 20)
    same(there, here)
    there.close()
    again = Server.open(path, here.rule)
    assert again.arrivals_waiting
    for server in (again, here):
        some_pushes(server, size, 25)
    same(again, here)
    for client in range(CLIENTS):
        assert bits(again.rows.row(client)) == bits(here.rows.row(client))


def test_models_keep_their_layout_and_buffers(tmp_path):
    model = {"weight": np.ones((4, 5), np.float32), "bn": {"running_mean": np.zeros(3, np.float32)}}
    update = {"weight": np.full((4, 5), 2, np.float32)}
    there = Server(fedbuff(buffer_size=2), model, store=tmp_path / "store")
    first = there.pull()
    for value in (1.0, 2.0, 7.0):
        there.push(client="ann", update=update, version=0, buffers={"bn": {"running_mean": np.full(3, value, "f4")}})
    before, old = there.pull(), first.buffers.tolist()
    there.checkpoint(keep=[first])
    there.close()
    again = Server.open(tmp_path / "store", fedbuff(buffer_size=2))
    now = again.pull()
    assert again.retained_versions[0].buffers.tolist() == old
    assert (bits(now.params), bits(now.buffers)) == (bits(before.params), bits(before.buffers))
    again.push(client="bob", update=update, version=0, buffers={"bn": {"running_mean": np.full(3, 9, np.float32)}})
    assert again.pull().buffers.tolist() == [8.0] * 3
    assert again.layout == there.layout
    check_error("lacks the model's buffers", again.step, [("bob", 0, np.ones(20, np.float32))])


@pytest.mark.parametrize("method", ["push", "step"])
def test_a_reopened_server_reads_trees_and_flat_vectors_as_before(tmp_path, method, rng):
    shapes, trees = {"w": (30, 40), "b": (40,)}, []
    for _ in range(6):
        trees.append({name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()})
    servers = [Server(fedbuff(buffer_size=3), trees[0], store=tmp_path / str(i)) for i in range(2)]
    servers[1].close()
    servers[1] = Server.open(tmp_path / "1", fedbuff(buffer_size=3))
    for server in servers:
        pushes = [(i, 0, tree if i % 3 else server.layout.flatten(tree)) for i, tree in enumerate(trees)]
        if method == "step":
            server.step(pushes)
        else:
            for client, version, update in pushes:
                server.push(client=client, version=version, update=update)
    assert bits(servers[0].params) == bits(servers[1].params)
    assert servers[0].counts == servers[1].counts


def test_params_outlive_their_server(tmp_path):
    server = made("fedbuff", 300, tmp_path / "store")
    first = server.pull()
    some_pushes(server, 300, 12)
    newest = server.pull()
    expected = bits(newest.params)
    server.close()
    server.close()  # twice does no harm
    del server
    assert first.params.tolist() == [1.0] * 300
    assert bits(newest.params) == expected
    again = Server.open(tmp_path / "store", fedbuff(buffer_size=M))
    some_pushes(again, 300, 12)
    assert bits(newest.params) == expected


def test_a_closed_server_says_so(tmp_path):
    server = made("fedbuff", 10, tmp_path / "store")
    server.close()
    for call in (lambda: some_pushes(server, 10, 1), server.flush, server.checkpoint, server.state_dict):
        check_error("this server is closed", call, error=StoreError)
    check_error("has no store", made("fedbuff", 10).checkpoint)
    server = made("ca2fl", 10, tmp_path / "rows")
    rows = server.rows
    server.close()
    check_error(r"cannot read .*index\.sqlite: the server has closed it", rows.row, 1, error=StoreError)


def test_threads_push_into_a_store(tmp_path):
    rule = ca2fl(buffer_size=M)
    server = Server(rule, np.zeros(5000), num_clients=40, log=True, store=tmp_path / "store")

    def vector(client, version):
        return np.full(5000, client + version % 7, np.float32)

    def work(clients):
        for _ in range(10):
            for client in clients:
                version = server.version
                server.push(client=client, update=vector(client, version), version=version)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (range(k, 40, 4) for k in range(4))))
    server.close()
    again = Server.open(tmp_path / "store", rule)
    fresh = Server(rule, np.zeros(5000), num_clients=40, log=True)
    same(again, replay(again.log, fresh, lambda join: vector(join.client_id, join.version)))


@pytest.mark.parametrize("rule", [ca2fl, fedbuff, wkafl])
def test_a_fork_is_refused(rule, tmp_path):
    server = Server(rule(buffer_size=2), np.zeros(10), num_clients=4, store=tmp_path / "store")
    push = partial(push_all, server, [1], np.ones(10))
    assert result(lambda _: check_error("is its parent's", push, error=UnavailableError)) == []
    assert push().status == "joined"


def test_another_codec_is_refused(tmp_path):
    path, rule = tmp_path / "store", ca2fl(buffer_size=M, codec="affine-4")
    Server(rule, np.zeros(300), num_clients=CLIENTS, store=path, seed=7).close()
    for codec in (None, "affine-vector-4", "affine-8", "bfloat16"):
        check_error("whose codec is 'affine-4'", Server.open, path, ca2fl(buffer_size=M, codec=codec), error=StoreError)
    assert Server.open(path, rule).rows.facts() == {"codec": "affine-4", "seed": 7}


def test_options_may_be_numbers_of_numpy(tmp_path):
    given = {"num_clients": np.int64(5), "seed": np.int64(3), "max_staleness": np.int32(4), "log": np.bool_(True)}
    rule = ca2fl(buffer_size=2, codec="affine-4")
    Server(rule, np.zeros(3), store=tmp_path / "store", **given).close()
    again = Server.open(tmp_path / "store", rule)
    assert (again.rows.num_clients, again.rows.seed, again.log) == (5, 3, ())


def test_rows_are_asked_for_by_numbers_of_numpy(tmp_path):
    for server in (made("ca2fl", 10), made("ca2fl", 10, tmp_path / "store")):
        push_all(server, (np.int32(client) for client in range(M)), np.ones(10), version=0)
        assert np.int64(1) in server.rows
        assert server.rows.row(np.int64(1)).tolist() == [1.0] * 10
    check_error(r"\[row\] client_id is 1180591620717411303424, .* fit into 64 bits", server.rows.row, 2**70)


def test_a_store_and_inplace_exclude_each_other(tmp_path):
    check_error(r"\[Server\] inplace: a store keeps the last", made, "fedbuff", 10, tmp_path / "store", inplace=True)
    assert not (tmp_path / "store").exists()
