"""How JAX's libraries and Keras hold the arrays of a model. No library is imported here."""

from dataclasses import replace
from typing import Any

import numpy as np

from role_trees import Container


def containers(jax, nnx, haiku, equinox, keras):
    """The containers of all libraries by name."""
    return of_flax(jax, nnx) | of_haiku(jax, haiku) | of_equinox(jax, equinox) | of_keras(keras)


def plain(arrays):
    return {name: np.asarray(array) for name, array in arrays.items()}


def places(arrays):
    return {f"a{place}": np.asarray(array) for place, array in enumerate(arrays)}


def of_flax(jax, nnx):
    """An nnx.State, an nnx module that has a Variable twice, and the collections of linen."""
    from flax import core

    kinds = {"trained": nnx.Param, "statistic": nnx.BatchStat, "local": nnx.Cache}
    module = type("Module", (nnx.Module,), {})

    def variables(arrays, roles):
        return {n: kinds.get(roles[n], nnx.Variable)(jax.numpy.asarray(array)) for n, array in arrays.items()}

    def put(arrays, roles):
        model = module()
        for name, variable in variables(arrays, roles).items():
            setattr(model, name, variable)
        model.again = getattr(model, next(iter(arrays)))
        return model

    def read(variables):
        return plain({n: each.get_value() for n, each in variables.items() if isinstance(each, nnx.Variable)})

    linen = collections(
        {"trained": "params", "statistic": "batch_stats", "local": "cache"}, "others", jax.numpy.asarray
    )
    return {
        "nnx state": Container(
            lambda *own: nnx.State({"part": variables(*own)}),
            lambda tree: read(tree["part"]),
            ("trained", "statistic", "constant", "local"),
            writable=False,
            wide=False,
        ),
        "nnx module": Container(
            put,
            lambda tree: read(vars(tree)),
            ("trained", "statistic", "constant", "local"),
            aliases=True,
            writable=False,
            wide=False,
        ),
        "linen": linen,
        "linen, frozen": replace(linen, put=lambda *own: core.freeze(linen.put(*own))),
    }


def collections(by_role, rest, converted, joined=dict):
    """Arrays in collections by their roles, each with one layer."""

    def put(arrays, roles):
        tree = {collection: {"layer": {}} for collection in (*by_role.values(), rest)}
        for name, array in arrays.items():
            tree[by_role.get(roles[name], rest)]["layer"][name] = converted(array)
        return joined(tree)

    def read(tree):
        return plain({name: array for part in tree.values() for name, array in part["layer"].items()})

    return Container(put, read, tuple(by_role), writable=False, wide=False)


def of_haiku(jax, hk):
    """Params and state, as dicts and as haiku's own mappings."""

    def put(arrays, roles):
        params = {name: jax.numpy.asarray(array) for name, array in arrays.items() if roles[name] == "trained"}
        averages = {name: jax.numpy.asarray(array) for name, array in arrays.items() if roles[name] == "statistic"}
        rest = {name: jax.numpy.asarray(array) for name, array in arrays.items() if name not in params | averages}
        return {"linear": params}, {"norm/~/mean_ema": averages, "others": rest}

    def read(tree):
        return plain({name: array for part in tree for layer in part.values() for name, array in layer.items()})

    return {
        "haiku": Container(put, read, ("trained", "statistic"), writable=False, wide=False),
        "haiku, frozen": Container(
            lambda *own: tuple(map(hk.data_structures.to_immutable_dict, put(*own))),
            read,
            ("trained", "statistic"),
            writable=False,
            wide=False,
        ),
    }


def of_equinox(jax, eqx):
    """A module that also has a function and a number among its leaves."""

    def put(arrays, roles):
        fields = dict.fromkeys([*arrays, "activation", "slope"], Any)
        cls = type("Module", (eqx.Module,), {"__annotations__": fields})
        return cls(*map(jax.numpy.asarray, arrays.values()), jax.nn.relu, 0.5)

    def read(tree):
        assert (tree.activation, tree.slope) == (jax.nn.relu, 0.5)
        return plain({name: array for name, array in vars(tree).items() if name not in ("activation", "slope")})

    return {"equinox": Container(put, read, writable=False, wide=False)}


def of_keras(keras):
    """A layer, and the list of its `get_weights`."""

    class Layer(keras.layers.Layer):
        def __init__(self, arrays, roles):
            super().__init__()
            for name, array in arrays.items():
                trains = roles[name] == "trained"
                weight = self.add_weight(shape=array.shape, dtype=str(array.dtype), trainable=trains, name=name)
                weight.assign(array)

    def read(tree):
        if isinstance(tree, Layer):
            return {variable.name: np.array(variable) for variable in tree.weights}
        return plain({name.rpartition(".")[2]: array for name, array in tree.items()})

    return {
        "keras": Container(Layer, read, differences=False),
        "keras list": Container(lambda *own: Layer(*own).get_weights(), places),
    }
