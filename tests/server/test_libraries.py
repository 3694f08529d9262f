"""Models of JAX's libraries and of Keras: roles, pushes and what goes out. These tests import the libraries."""

import os
from collections import namedtuple

import numpy as np
import pytest

import library_trees
from afflux import Layout, Server
from afflux.integrations._npy import array_of, bytes_of
from afflux.rules import ca2fl, fadas, fedasync, fedbuff
from conftest import bits, check_error
from pairwise import pairwise, soak_all
from role_trees import (
    ALIAS,
    CONTAINERS,
    Container,
    bits_after_a_round,
    by_name,
    check_round,
    copies,
    roles_by_name,
    torch_dict,
)

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


FLAX = roles_by_name(
    trained="dense.bias dense.kernel norm.bias norm.scale",
    statistic="norm.mean norm.var",
    local="drop.rngs.count drop.rngs.key",
    constant="table",
)


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


def test_nnx_modules_share_variables(nnx, jax):
    """A variable under two names is one; the module that goes out shares it, unless the two are trained apart."""

    class Tied(nnx.Module):
        def __init__(self, seed=0):
            self.first = nnx.Param(np.full(2, seed, np.float32))
            self.layers = nnx.List([self.first])

    class Thrice(Tied):
        def __init__(self, seed=0):
            super().__init__(seed)
            self.last = self.first

    model = Thrice()
    server = Server(fedbuff(buffer_size=1), model, layout=Layout.of(model, roles={"layers.0": "trained"}))
    assert server.layout.roles == {"first": "trained", "layers.0": "trained", "last": "alias"}
    server.push(client=0, version=0, model=Thrice(1))
    tree = server.checkout("ann").tree()
    assert tree.last is tree.first is not tree.layers[0]
    assert tree.layers[0].get_value().tolist() == [1, 1]
    model = Tied()
    server = Server(fedbuff(buffer_size=1), model)
    assert server.layout.roles == {"first": "trained", "layers.0": "alias"}
    assert server.push(client=0, version=0, model=Tied(1)).status == "joined"
    assert server.push(client=0, version=1, model=nnx.state(Tied(1))).status == "joined"
    tree = server.checkout("ann").tree()
    assert tree.layers[0] is tree.first
    assert tree.first.get_value().tolist() == [1, 1]
    client = Tied(2)
    client.layers[0] = nnx.Param(np.ones(2, np.float32))
    check_error(r"layers\.0 differs from first", server.push, client=0, version=2, model=client)
    server = Server(fedbuff(buffer_size=1), model, layout=Layout.of(model, roles={"layers.0": "trained"}))
    assert server.push(client=0, version=0, model=client).status == "joined"
    tree = server.checkout("ann").tree()
    assert (tree.first.get_value()[0], tree.layers[0].get_value()[0]) == (2, 1)
    server = Server(fedbuff(buffer_size=1), nnx.state(model))  # which has one name
    assert server.push(client=0, version=0, model=Tied(1)).status == "joined"


def test_an_nnx_module_that_keeps_its_random_numbers(nnx, jax):
    """Rngs of flax has attributes of any name, those of arrays and of torch modules among them."""

    class Noisy(nnx.Module):
        def __init__(self, seed=0):
            self.rngs = nnx.Rngs(seed)
            self.layer = nnx.Param(np.full(2, seed, np.float32))

    server = Server(fedbuff(buffer_size=1), Noisy())
    assert server.layout.roles == {"layer": "trained", "rngs.default.count": "local", "rngs.default.key": "local"}
    assert server.push(client=0, version=0, model=Noisy(1)).status == "joined"
    assert isinstance(server.checkout("ann").tree().rngs, nnx.Rngs)


def test_a_module_that_answers_every_name(nnx):
    """It is no torch module, and comes out as it came in."""

    class Open(nnx.Module):
        def __init__(self, seed=0):
            self.layer = nnx.Param(np.full(2, seed, np.float32))

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return name

    server = Server(fedbuff(buffer_size=1), Open())
    server.push(client=0, version=0, model=Open(1))
    tree = server.checkout("ann").tree()
    assert (type(tree), tree.layer.get_value().tolist()) == (Open, [1, 1])


def made(jax, init, *arguments):
    """What a model's `init` returns, with ones in place of random numbers: nothing is compiled."""
    shapes = jax.eval_shape(init, *arguments)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(np.ones(leaf.shape, leaf.dtype)), shapes)


def test_named_tuples_come_out_with_their_arrays(jax):
    """A layout names the arrays of a tuple by their places, also where JAX names them by fields."""
    pair = namedtuple("pair", "left right")

    @jax.tree_util.register_pytree_with_keys_class
    class Node:
        def __init__(self, child):
            self.child = child

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("child"), self.child)], None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    inner = pair(np.ones(1, np.float32), {"b": (pair(np.zeros(2, np.float32), None),)})
    for model in (inner, Node(inner)):
        tree = Server(fedbuff(buffer_size=1), model).checkout("ann").tree()
        assert type(tree) is type(model)
        assert jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(model)
        assert [array.tolist() for array in jax.tree_util.tree_leaves(tree)] == [[1], [0, 0]]


def test_equinox(jax):
    """A module with functions among its leaves comes out as a module of its class."""
    import equinox as eqx

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
    import haiku as hk

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


@pytest.fixture(scope="module")
def library_containers(jax, nnx, keras):
    import equinox
    import haiku

    return library_trees.containers(jax, nnx, haiku, equinox, keras)


KINDS = ["update", "gradient", "model"]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras itself
@pairwise(
    "container, kind, form",
    ["nnx state", "nnx module", "linen", "linen, frozen", "haiku", "haiku, frozen", "equinox", "keras", "keras list"],
    KINDS,
    KINDS,
)
@pytest.mark.parametrize("seed", [0, *soak_all([(seed,) for seed in range(1, 30)])])
def test_a_round_of_each_library_against_a_dictionary(library_containers, container, kind, form, seed):
    """Every role that the container holds; what goes out has the names, shapes and dtypes of what came in."""
    check_round(library_containers[container], kind, form, seed)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_every_container_gives_one_digest(library_containers, tmp_path):
    """The same arrays in each container, pushed to a server that is made of the same container."""
    from safetensors.torch import load_file, save_file

    def file(*own):
        save_file({name: a for name, a in torch_dict(*own).items() if name != ALIAS}, tmp_path / "m.safetensors")
        return load_file(tmp_path / "m.safetensors")

    def record(*own):
        return {name: array_of(bytes_of(array), str(array.dtype)) for name, array in copies(*own).items()}

    containers = {name: library_containers[name] for name in ("keras list", "nnx state")}
    containers |= {
        "module": CONTAINERS["module"],
        "state_dict": CONTAINERS["state_dict"],
        "safetensors": Container(file, by_name),
        "Flower record": Container(record, by_name),
    }
    for rule in RULES:
        digests = {name: bits_after_a_round(container, rule) for name, container in containers.items()}
        assert all(digest == digests["module"] for digest in digests.values()), (rule.name, digests)


def keras_model(keras):
    return keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras itself
def test_keras(keras):
    """Two models of one kind in one process, whose layers have other names; then the list of `get_weights`."""
    start, client = keras_model(keras), keras_model(keras)
    server = Server(fedbuff(buffer_size=1), start)
    assert server.layout.roles == roles_by_name(
        trained="0.kernel 1.bias 2.gamma 3.beta",
        statistic="4.moving_mean 5.moving_variance",
        local="6.seed_generator_state",
    )
    assert set(Layout.of(start, select="trainable").roles) >= {"0.kernel", "1.bias", "2.gamma", "3.beta"}
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
