"""Models of JAX's libraries and of Keras: roles, pushes and what goes out. These tests import the libraries."""

import os

import numpy as np
import pytest

from afflux import Layout, Server
from afflux.rules import ca2fl, fadas, fedasync, fedbuff
from conftest import bits

RULES = [fedbuff(buffer_size=2), fadas(buffer_size=2), ca2fl(buffer_size=2), fedasync(alpha=0.5)]


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax")


@pytest.fixture(scope="module")
def nnx(jax):
    return pytest.importorskip("flax.nnx")


@pytest.fixture(scope="module")
def keras():
    pytest.importorskip("torch")
    os.environ["KERAS_BACKEND"] = "torch"
    return pytest.importorskip("keras")


def roles(tree, **options):
    return Layout.of(tree, **options).roles


def flax_model(nnx, seed=0):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.table = nnx.Variable(np.array([1, 2**30], np.int32))

        def __call__(self, x):
            return self.drop(self.norm(self.dense(x)))

    return Model(nnx.Rngs(seed))


FLAX = {
    "dense.bias": "trained",
    "dense.kernel": "trained",
    "norm.bias": "trained",
    "norm.scale": "trained",
    "norm.mean": "statistic",
    "norm.var": "statistic",
    "drop.rngs.count": "local",
    "drop.rngs.key": "local",
    "table": "constant",
}


def test_roles_of_nnx_are_the_types_of_variables(nnx, jax):
    model = flax_model(nnx)
    for tree in (model, nnx.state(model)):
        assert roles(tree) == FLAX
        assert roles(tree, roles={"norm.*": "local"})["norm.mean"] == "local"


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
@pytest.mark.parametrize("form", ["module", "state"])
def test_nnx_round_trip(nnx, jax, rule, form, tmp_path):
    """A forward changes RngCount and the statistics; the state that goes out fits into the model."""
    read = nnx.state if form == "state" else lambda model: model
    server = Server(rule, read(flax_model(nnx)), num_clients=4)
    for client in range(rule.buffer_size):
        model = flax_model(nnx, client)
        model(jax.numpy.ones((4, 2)))
        assert server.push(client=client, version=0, model=read(model)).status == "joined"
    assert server.version == 1
    tree = server.checkout("ann").tree()
    if form == "state":
        assert type(tree) is nnx.State
        nnx.update(flax_model(nnx), tree)
    else:
        tree(jax.numpy.ones((4, 2)))  # a model of the same class
    names = Layout.of(tree)
    assert names.roles == FLAX
    assert bits(names.flatten(tree)) == bits(server.params)
    assert (names.flatten_buffers(tree)[3:] > 0).all()  # no variance is negative


def made(jax, init, *arguments):
    """What a model's `init` returns, with ones in place of random numbers: nothing is compiled."""
    shapes = jax.eval_shape(init, *arguments)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(np.ones(leaf.shape, leaf.dtype)), shapes)


def test_equinox(jax):
    """A module with functions among its leaves comes out as a module of its class."""
    eqx = pytest.importorskip("equinox")
    make = eqx.filter_eval_shape(lambda: eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0)))
    model = jax.tree.map(lambda leaf: np.ones(leaf.shape, "f4") if hasattr(leaf, "shape") else leaf, make)
    server = Server(fedbuff(buffer_size=1), model)
    assert set(server.layout.roles.values()) == {"trained"}
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in ("weight", "bias")]
    assert list(server.layout.roles) == names
    other = jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array_like(leaf) else leaf, model)
    server.push(client=0, version=0, model=other)
    mine = server.checkout("ann").tree()
    assert type(mine) is eqx.nn.MLP
    assert mine.activation is model.activation
    assert mine.layers[0].weight.tolist() == [[2.0, 2.0]] * 3


def test_haiku(jax):
    hk = pytest.importorskip("haiku")
    network = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), True))
    params, state = made(jax, network.init, jax.random.PRNGKey(0), jax.numpy.ones((2, 2)))
    found = roles({"params": params, "state": state})
    assert {role for name, role in found.items() if name.startswith("params")} == {"trained"}
    assert {role for name, role in found.items() if name.startswith("state")} == {"statistic"}
    server = Server(fedbuff(buffer_size=1), (params, state))
    assert server.push(client=0, version=0, model=(params, state)).status == "joined"


def test_linen_by_collection(jax, nnx):
    from flax import core, linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.variable("cache", "last", lambda: jax.numpy.zeros(2))
            x = linen.SpectralNorm(linen.Dense(3))(x, update_stats=True)
            return linen.BatchNorm(use_running_average=False)(x)

    variables = made(jax, Model().init, jax.random.PRNGKey(0), jax.numpy.ones((2, 2)))
    expected = {
        "batch_stats.BatchNorm_0.mean": "statistic",
        "batch_stats.BatchNorm_0.var": "statistic",
        "batch_stats.SpectralNorm_0.Dense_0/kernel/sigma": "copied",
        "batch_stats.SpectralNorm_0.Dense_0/kernel/u": "copied",
        "cache.last": "local",
    }
    for tree in (variables, core.freeze(variables)):
        found = roles(tree)
        assert {name: role for name, role in found.items() if role != "trained"} == expected
        assert all(name.startswith("params.") for name, role in found.items() if role == "trained")
        server = Server(fedbuff(buffer_size=1), tree)
        assert server.push(client=0, version=0, model=tree).status == "joined"
        assert type(server.checkout("ann").tree()) is type(tree)


NAMES = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


def containers(nnx, folder):
    """Functions that put arrays by name, those of a BatchNorm, into each container; and how its server is made."""
    import torch
    from safetensors.torch import load_file, save_file

    def module(arrays):
        norm = torch.nn.BatchNorm1d(3)
        norm.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        return norm

    def file(arrays):
        save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / "model.safetensors")
        return load_file(folder / "model.safetensors")

    def record(arrays):
        return {
            name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for name, array in arrays.items()
        }

    def state(arrays):
        kinds = [nnx.Param, nnx.Param, nnx.BatchStat, nnx.BatchStat, nnx.BatchStat]
        return nnx.State({name: kind(arrays[name]) for name, kind in zip(NAMES, kinds, strict=True)})

    return {
        "module": (module, {}),
        "state_dict": (lambda arrays: module(arrays).state_dict(), {}),
        "safetensors": (file, {}),
        "Flower record": (record, {}),
        "list of get_weights": (lambda arrays: [arrays[name] for name in NAMES], {"[234]": "statistic"}),
        "nnx": (state, {}),
    }


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_every_container_gives_one_digest(nnx, rule, tmp_path):
    """The same arrays in each container, pushed to a server that is made of the same container."""
    rng = np.random.default_rng(0)

    def arrays():
        found = {name: rng.random(3).astype(np.float32) for name in NAMES[:4]}
        return found | {NAMES[4]: np.array(rng.integers(9))}

    start, *clients = (arrays() for _ in range(1 + rule.buffer_size))
    results = {}
    for name, (put, declared) in containers(nnx, tmp_path).items():
        first = put(start)
        server = Server(rule, first, num_clients=4, layout=Layout.of(first, roles=declared or None))
        for client, model in enumerate(clients):
            assert server.push(client=client, version=0, model=put(model), num_examples=1 + client).status == "joined"
        order = [field.name for field in (*server.layout.fields, *server.layout.buffers)]
        pieces = {field.name.rpartition(".")[2]: array for field, array in server.layout._pieces_of(*flat_of(server))}
        places = dict(zip([str(place) for place in range(5)], NAMES, strict=True))
        assert sorted(places.get(each, each) for each in order) == sorted(NAMES)
        results[name] = {places.get(each, each): bits(np.asarray(array)) for each, array in pieces.items()}
    assert all(result == results["module"] for result in results.values())


def flat_of(server):
    pulled = server.pull()
    return pulled.params, pulled.buffers


def keras_model(keras):
    return keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(2),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras itself
def test_keras(keras):
    """Two models of one kind in one process, whose layers have other names; then the list of `get_weights`."""
    start, client = keras_model(keras), keras_model(keras)
    server = Server(fedbuff(buffer_size=1), start)
    assert server.layout.roles == {
        "0.kernel": "trained",
        "1.bias": "trained",
        "2.gamma": "trained",
        "3.beta": "trained",
        "4.moving_mean": "statistic",
        "5.moving_variance": "statistic",
        "6.seed_generator_state": "local",
    }
    client.set_weights([weight + 1 for weight in client.get_weights()])
    assert server.push(client=0, version=0, model=client).status == "joined"
    mine = keras_model(keras)
    server.checkout("ann")
    assert server.pull(out=mine) == 1
    for ours, theirs in zip(mine.get_weights(), client.get_weights(), strict=True):
        assert np.allclose(ours, theirs)
    assert server.push(client=1, version=1, model=client.get_weights()).status == "joined"
    assert bits(server.pull().buffers) == bits(np.array([1.0, 1.0, 2.0, 2.0]))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_lists_without_names(keras):
    """All arrays are trained, unless roles say more."""
    weights = keras_model(keras).get_weights()
    assert set(roles(weights).values()) == {"trained"}
    assert roles(weights, roles={"[45]": "statistic"})["5"] == "statistic"
