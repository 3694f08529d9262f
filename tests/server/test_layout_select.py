"""Layouts of a part of a model: LoRA's adapters, a head alone; whole models go in and out."""

import json

import numpy as np
import pytest
import torch

from afflux import Layout, Server
from afflux.rules import fedasync, fedbuff
from conftest import bits, check_error


class LoRA(torch.nn.Module):
    """A frozen linear layer plus a trainable product of rank 2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = torch.nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = torch.nn.Parameter(torch.randn(2, inputs))
        self.lora_B = torch.nn.Parameter(torch.randn(outputs, 2))


def adapted(seed=0):
    """Two layers with adapters around a frozen BatchNorm; a head and a BatchNorm that train."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(LoRA(3, 4), torch.nn.BatchNorm1d(4), LoRA(4, 4))
    model.add_module("head", torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)))
    model[1].requires_grad_(False)
    for norm in (model[1], model.head[0]):
        norm.running_mean.fill_(seed + 0.5)
        norm.num_batches_tracked.fill_(seed + 7)
    return model


HEAD = ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"]
TRAINED = ["0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B", *HEAD]
STATISTICS = ["head.0.running_mean", "head.0.running_var", "head.0.num_batches_tracked"]
FORMS = {
    "module": lambda model: model,
    "state_dict": lambda model: model.state_dict(),
    "numpy": lambda model: {name: array.numpy() for name, array in model.state_dict().items()},
    "parameters": lambda model: dict(model.named_parameters()) | dict(model.named_buffers()),
    "selected alone": lambda model: {name: model.state_dict()[name] for name in TRAINED + STATISTICS},
    "other order": lambda model: dict(reversed(model.state_dict().items())),
    "more": lambda model: model.state_dict() | {"step": 3, "notes": "none", "extra": np.ones(5)},
}


def flat(model, names=TRAINED):
    return np.concatenate([model.state_dict()[name].numpy().ravel() for name in names])


def names_of(fields):
    return [field.name for field in fields]


@pytest.mark.parametrize("form", FORMS)
def test_trainable_parameters_of_whole_models(form):
    layout = Layout.of(adapted(), select="trainable")
    assert names_of(layout.fields) == TRAINED
    assert names_of(layout.buffers) == STATISTICS
    model = adapted(1)
    tree = FORMS[form](model)
    assert bits(layout.flatten(tree)) == bits(flat(model))
    assert layout.flatten_buffers(tree).tolist() == [1.5] * 4 + [1.0] * 4 + [8.0]
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_frozen_integers_are_not_trainable():
    """Codes of a quantised model, also where they are the only parameter of their module."""
    codes = torch.nn.Module()
    codes.weight = torch.nn.Parameter(torch.ones(4, 1, dtype=torch.uint8), False)
    codes.register_buffer("absmax", torch.ones(1))
    layout = Layout.of(torch.nn.Sequential(codes, torch.nn.Linear(2, 1)), select="trainable")
    assert [*layout.roles] == ["1.weight", "1.bias"]


def test_only_what_is_selected_is_written():
    layout = Layout.of(adapted(), select="trainable")
    for form in ("module", "state_dict", "numpy", "selected alone", "more"):
        model = adapted(2)
        before = {name: bits(array) for name, array in model.state_dict().items()}
        layout.load(FORMS[form](model), np.arange(layout.size, dtype=np.float32), np.arange(9.0))
        assert flat(model).tolist() == list(range(layout.size))
        assert model.head[0].num_batches_tracked.item() == 8
        changed = [name for name, array in model.state_dict().items() if bits(array) != before[name]]
        assert set(changed) <= {*TRAINED, *STATISTICS}


def test_a_model_that_trains_as_a_whole_has_the_whole_layout():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    whole, trainable = Layout.of(model), Layout.of(model, select="trainable")
    assert (whole.fields, whole.buffers, whole.nesting) == (trainable.fields, trainable.buffers, trainable.nesting)
    assert not whole.partial
    assert trainable.partial


def test_arrays_of_other_libraries_are_all_trainable():
    tree = {"params": {"w": np.ones(2)}, "batch_stats": {"mean": np.ones(3)}}
    layout = Layout.of(tree, select="trainable")
    assert names_of(layout.fields) == ["params.w"]
    assert names_of(layout.buffers) == ["batch_stats.mean"]


def test_names_and_functions():
    model = adapted()
    head = ["head.1.bias", "head.1.weight", "head.0.running_mean"]
    for select in (head, set(head), dict.fromkeys(head), lambda name, array: name in head):
        layout = Layout.of(model, select=select)
        assert names_of(layout.fields) == ["head.1.weight", "head.1.bias"]  # in the model's order
        assert names_of(layout.buffers) == ["head.0.running_mean"]
        assert bits(layout.flatten(model)) == bits(flat(model, ["head.1.weight", "head.1.bias"]))
    large = Layout.of(model, select=lambda name, array: array.ndim == 2)
    assert names_of(large.fields) == [n for n, p in model.named_parameters() if p.ndim == 2]
    assert not large.buffers


def test_nested_trees_keep_their_nesting():
    tree = {"body": {"w": np.ones(2), "b": np.ones(1)}, "blocks": [np.ones(3), (np.ones(1), np.ones(4))], "end": None}
    layout = Layout.of(tree, select=["body.b", "blocks.1.1"])
    views = layout.views(np.arange(5, dtype=np.float32))
    assert list(views) == ["body", "blocks"]
    assert list(views["body"]) == ["b"]
    assert views["blocks"][0] is None
    assert views["blocks"][1][0] is None
    assert views["blocks"][1][1].tolist() == [1, 2, 3, 4]
    assert layout.flatten(views).tolist() == [0, 1, 2, 3, 4]
    assert layout.flatten(tree).tolist() == [1] * 5
    assert layout.flatten({"body": {"b": np.zeros(1), "w": "text"}, "blocks.1.1": np.ones(4)}).tolist() == [0] + [1] * 4
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    listed = Layout.of([np.ones(2), np.ones(3), np.ones(4)], select=["1"])
    assert listed.flatten([0.5, np.arange(3), "text"]).tolist() == [0, 1, 2]
    assert listed.flatten([np.ones(9), np.arange(3.0), np.ones(9), np.ones(9)]).tolist() == [0, 1, 2]
    assert listed.views(np.arange(3, dtype=np.float32))[0] is None


def test_frozen_arrays_may_be_of_any_kind():
    """As the packed weights of QLoRA, and a base model whose weights are elsewhere."""
    model = LoRA(3, 4)
    model.base = torch.nn.Linear(3, 4, device="meta").requires_grad_(False)
    model.register_buffer("packed", torch.ones(5, dtype=torch.complex64))
    select = ["lora_A", "lora_B"]
    for layout in (Layout.of(model, select=select), Layout.of(dict(model.named_parameters()), select="trainable")):
        assert layout.flatten(model).size == 14


def test_tied_parameters():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "body": torch.nn.Linear(3, 3)})
    model["head"] = torch.nn.Linear(3, 5, bias=False)
    model["head"].weight = model["embed"].weight
    layout = Layout.of(model, select=["embed.weight"])
    # The state_dict holds the tied array twice.
    for tree in (model, model.state_dict()):
        assert bits(layout.flatten(tree)) == bits(model["embed"].weight.detach().numpy())
    layout.load(model, np.arange(15, dtype=np.float32))
    assert model["head"].weight.flatten().tolist() == list(range(15))
    check_error(r"select has 'head\.weight', which the tree does not", Layout.of, model, select=["head.weight"])


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (["head.1.weights"], r"select has 'head\.1\.weights', which the tree does not; did you mean head\.1\.weight, "),
        (["head"], r"select has 'head', .*; did you mean head\.0\.weight, head\.0\.bias, head\.1\.weight\?$"),
        (["nothing like it"], "select has 'nothing like it', which the tree does not$"),
        ([3], "select has 3, which the tree does not$"),
        ([["0.lora_A"]], r"select has \['0\.lora_A'\], which the tree does not$"),
        ("head", "select is 'head', expected 'trainable', names or a function"),
        (5, "select is 5, expected"),
        ([], "select chooses no parameter$"),
        (["head.0.running_mean"], "select chooses no parameter$"),
        (lambda name, array: False, "select chooses no parameter$"),
    ],
)
def test_wrong_selections(select, message):
    check_error(rf"^\[layout\] {message}", Layout.of, adapted(), select=select)


def test_a_state_dict_does_not_say_what_trains():
    check_error(r"none requires grad \(in a state_dict none", Layout.of, adapted().state_dict(), select="trainable")


def test_selected_arrays_are_still_checked():
    layout = Layout.of(adapted(), select="trainable")
    tree = adapted().state_dict()
    check_error("lacks 0.lora_A", layout.flatten, {name: array for name, array in tree.items() if name != "0.lora_A"})
    check_error(r"0\.lora_A .*\(3,\).*\(2, 3\)", layout.flatten, tree | {"0.lora_A": np.ones(3)})
    check_error(r"0\.lora_A is a float, expected an array", layout.flatten, tree | {"0.lora_A": 0.5})


# Servers


@pytest.mark.parametrize("form", ["module", "state_dict", "numpy", "flat"])
def test_servers_of_a_part(form):
    """FedAsync with alpha = 1/2: the mean of the two models, and the frozen arrays are the client's own."""
    start, trained = adapted(0), adapted(1)
    server = Server(fedasync(alpha=0.5), start, layout=Layout.of(start, select="trainable"))
    expected = (flat(start).astype(np.float64) + 0.5 * (flat(trained).astype(np.float64) - flat(start))).astype("f4")
    vector, buffers = (flat(trained), trained) if form == "flat" else (FORMS[form](trained), None)
    server.push(client="ann", version=0, model=vector, buffers=buffers)
    assert bits(server.params) == bits(expected)
    assert server.pull().buffers.tolist() == [1.0] * 4 + [1.0] * 4 + [7.5]
    mine = adapted(2)
    assert server.pull(out=mine) == 1
    assert bits(flat(mine)) == bits(expected)
    frozen = [name for name in mine.state_dict() if name not in TRAINED + STATISTICS]
    assert bits(flat(mine, frozen)) == bits(flat(adapted(2), frozen))


def test_a_store_keeps_the_selection(tmp_path):
    start = adapted()
    layout = Layout.of(start, select=TRAINED)
    update = {name: torch.ones_like(array) for name, array in start.state_dict().items()}
    with Server(fedbuff(buffer_size=1), start, layout=layout, store=tmp_path / "store") as server:
        state = server.state_dict()
    with Server.open(tmp_path / "store") as server:
        assert server.layout == layout
        server.push(client=0, update=update, version=0)
        assert bits(server.params) == bits(flat(start) + np.float32(1))
    same = Server(fedbuff(buffer_size=1), start, layout=layout)
    same.load_state_dict(state)
    small = {name: start.state_dict()[name] for name in TRAINED}
    check_error(r"layout is .* in the state", Server(fedbuff(buffer_size=1), small).load_state_dict, state)


@pytest.mark.parametrize("layout", ["trainable", Layout.of([np.ones(2)])])
def test_wrong_layouts_of_servers(layout):
    check_error(r"^\[Server\] (layout is |params: \[layout\] .* lacks 0)", Server, fedbuff(), adapted(), layout=layout)
    check_error(r"^\[Server\] layout is .*, must be the Layout of params", Server, fedbuff(), np.ones(2), layout=layout)
