"""Models with arrays of every role in the containers of each library; their rounds against a dictionary in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from afflux import Calibrate, Layout, Rule, Server
from afflux.ops import Step
from conftest import bits
from oracle import statistics

Arrays = dict[str, Any]
ROLES = ("trained", "statistic", "copied", "constant", "local")
WEIGHTS = (0.25, 0.5, 0.125)  # sums of small integers by these are exact in float16
RATES = {"client_lr": 0.5, "local_steps": 2}
#: The further name of the first trained array.
ALIAS = "again"


@dataclass(frozen=True)
class Container:
    """How a library holds the arrays of a model."""

    put: Callable[[Arrays, dict[str, str]], Any]  #: makes the tree of arrays by name, and their roles by name
    get: Callable[[Any], Arrays]  #: a tree's arrays by the names that `put` has received, and by `ALIAS`
    declares: tuple[str, ...] = ("trained",)  #: the roles that need no `roles=`
    aliases: bool = False  #: whether `put` adds an array's further name
    writable: bool = True  #: for `pull(out=)`
    differences: bool = True  #: whether it may hold an update or a gradient; modules cannot
    wide: bool = True  #: whether it holds dtypes of 64 bits


def weighted(kind, weights, lr=1.0):
    """A rule of these weights."""
    vector = np.array(weights, float)
    return Rule("mine", kind, len(weights), lambda arrivals: vector, Calibrate(False), lambda arrivals: Step("sgd", lr))


def roles_by_name(**names: str) -> dict[str, str]:
    """{name: role} of the words with the names of each role."""
    return {name: role for role, words in names.items() for name in words.split()}


def copies(arrays, roles):
    return {name: array.copy() for name, array in arrays.items()}


def by_name(tree):
    arrays = tree if isinstance(tree, dict) else tree.state_dict()
    return {name: np.asarray(array) for name, array in arrays.items()}


def torch_module(arrays, roles):
    """A module of parameters and buffers, the first of which has a further name."""
    import torch

    module = torch.nn.Module()
    for name, array in copies(arrays, roles).items():
        if roles[name] == "trained":
            module.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array)))
        else:
            module.register_buffer(name, torch.from_numpy(array))
    module.again = getattr(module, next(iter(arrays)))
    return module


def torch_dict(arrays, roles):
    return dict(torch_module(arrays, roles).state_dict())


def values(role: str, rng: np.random.Generator, *, wide: bool) -> Any:
    """An array for a role, of a dtype and a shape by chance."""
    shape = [(), (3,), (2, 1)][rng.integers(3)]
    dtypes = {
        "trained": ["f4", "f2"],
        "statistic": ["f4", "i4", "f8" if wide else "f4"],
        "copied": ["u1", "f4", "i8" if wide else "i4"],
        "constant": ["f4", "u1", "i8" if wide else "i4"],
        "local": ["f4", "i4"],
    }[role]
    array = rng.integers(0, 9, shape).astype(dtypes[rng.integers(len(dtypes))])
    if role == "constant" and array.dtype == "f4":
        array.view("u4")[...] = 0x7FC00123  # a NaN of these bits
    return array


CONTAINERS = {
    "numpy dict": Container(copies, by_name),
    "nested": Container(lambda *own: [{"part": copies(*own)}], lambda tree: by_name(tree[0]["part"])),
    "list": Container(
        lambda *own: list(copies(*own).values()), lambda tree: {f"a{place}": array for place, array in enumerate(tree)}
    ),
    "torch dict": Container(torch_dict, by_name, aliases=True),
    "module": Container(torch_module, by_name, aliases=True, differences=False),
    "state_dict": Container(lambda *own: torch_module(*own).state_dict(), by_name, aliases=True, differences=False),
}


def layout_of(container: Container, tree: Any, roles: dict[str, str]) -> tuple[Layout, dict[str, str]]:
    """The layout in which a tree's arrays have these roles, and the names of the arrays in it."""
    names = {f"a{n}" if (n := full.rpartition(".")[2]).isdecimal() else n: full for full in Layout.of(tree).roles}
    patterns: Any = {names[name]: role for name, role in roles.items() if role not in container.declares}
    layout = Layout.of(tree, roles=patterns)
    further = {ALIAS: "alias"} if container.aliases else {}
    assert layout.roles == {names[name]: role for name, role in (roles | further).items()}
    return layout, names


def check_round(container: Container, kind: str, form: str, seed: int) -> None:
    """Make a round of a rule of this `kind` by pushes of this `form`; what goes out is compared, and pushed again."""
    rng = np.random.default_rng(seed)
    drawn = ["trained", *rng.permutation([*ROLES, *rng.choice(ROLES, rng.integers(3))]).tolist()]
    drawn.sort(key=lambda role: role != "trained")  # the order of Keras' get_weights
    roles = {f"a{place}": role for place, role in enumerate(drawn)}
    start = {name: values(role, rng, wide=container.wide) for name, role in roles.items()}

    def trained() -> Arrays:
        fresh = {name: rng.integers(0, 9, array.shape).astype(array.dtype) for name, array in start.items()}
        return {name: start[name] if role == "constant" else fresh[name] for name, role in roles.items()}

    first = container.put(start, roles)
    layout, names = layout_of(container, first, roles)
    server = Server(weighted(kind, WEIGHTS), first, layout=layout)

    def push(client: int, **arguments: Any) -> None:
        rates = RATES if (kind == "gradient") != ("gradient" in arguments) else {}
        assert server.push(client=client, version=server.version, **arguments, **rates).status == "joined"

    clients = [trained() for _ in WEIGHTS]
    for number, client in enumerate(clients):
        vector = client
        if form != "model":
            sign = -1 if form == "gradient" else 1
            moves = {n: sign * (client[n].astype("f8") - a) for n, a in start.items() if roles[n] == "trained"}
            vector = client | {n: np.asarray(move, start[n].dtype) for n, move in moves.items()}
        if form == "model" or container.differences:
            push(number, **{form: container.put(vector, roles)}, buffers=container.put(client, roles))
        else:
            push(number, **{form: {names[name]: vector[name] for name in moves}}, buffers=container.put(client, roles))

    out = server.checkout("ann").tree()
    arrays = container.get(out)
    assert arrays.keys() == roles.keys() | ({ALIAS} if container.aliases else set())
    for name, role in roles.items():
        array, theirs = start[name], [client[name].astype("f8") for client in clients]
        assert (arrays[name].shape, arrays[name].dtype) == (array.shape, array.dtype)
        if role == "trained":
            moves = sum(weight * (own - array) for weight, own in zip(WEIGHTS, theirs, strict=True))
            assert np.array_equal(arrays[name], array + moves)
        elif role == "statistic":
            off = np.abs(arrays[name] - statistics(kind, array, theirs, np.array(WEIGHTS)))
            assert (off <= (0.5 + 1e-9 if array.dtype == "i4" else 9 * 2.0**-23)).all()
        else:
            assert bits(arrays[name]) == bits(clients[1][name] if role == "copied" else array)
    assert not container.aliases or bits(arrays[ALIAS]) == bits(arrays["a0"])

    for number in range(len(WEIGHTS)):
        push(number, model=out)
    again = container.get(server.checkout("ann").tree())
    assert {name: bits(array) for name, array in again.items()} == {name: bits(a) for name, a in arrays.items()}
    if container.writable:
        target = container.put({name: np.zeros_like(array) for name, array in start.items()}, roles)
        server.pull(out=target)
        written = container.get(target)
        own = [name for name, role in roles.items() if role == "local"]
        assert all(bits(written[name]) == bits(array) for name, array in arrays.items() if name not in own)


#: The arrays of a small model, by the names of torch's BatchNorm where it has some.
MODEL = roles_by_name(
    trained="weight bias",
    statistic="running_mean running_var num_batches_tracked",
    copied="u",
    constant="codes mask",
    local="noise",
)


def drawn_model(rng: np.random.Generator) -> Arrays:
    """Values of `MODEL`; those of its constants are always the same."""
    shapes = {"weight": (3, 2), "u": (2, 2), "num_batches_tracked": ()}
    arrays = {name: rng.standard_normal(shapes.get(name, (3,))).astype("f4") for name in MODEL}
    arrays["running_var"] **= 2
    counter = rng.integers(9, size=()).astype("i4")
    codes, mask = np.array([[2**31 - 1, -(2**24) - 1]], "i4"), np.array([0, -np.inf], "f4")
    return arrays | {"num_batches_tracked": counter, "codes": codes, "mask": mask}


def bits_after_a_round(container: Container, rule: Any) -> dict[str, bytes]:
    """The bits of the arrays of `MODEL` by name after one round of a server of the container."""
    rng = np.random.default_rng(5)
    first = container.put(drawn_model(rng), MODEL)
    names = list(MODEL) if isinstance(first, list) else None
    patterns: Any = {f"*{name}": role for name, role in MODEL.items() if role not in container.declares}
    if names is not None:
        patterns = {str(place): MODEL[name] for place, name in enumerate(names)}
    server = Server(rule, first, layout=Layout.of(first, roles=patterns), num_clients=4)
    for client in range(rule.buffer_size):
        model = container.put(drawn_model(rng), MODEL)
        assert server.push(client=client, version=0, model=model, num_examples=1 + client).status == "joined"
    assert server.version == 1
    arrays = container.get(server.checkout("ann").tree())
    return {name: bits(arrays[name if names is None else f"a{place}"]) for place, name in enumerate(MODEL)}
