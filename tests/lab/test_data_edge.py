"""Data as users have them: taken, or an error that names the argument."""

import numpy as np
import pytest
import torch
from torch import nn

import own_tasks
from afflux.lab import Simulation
from afflux.sim import TrainingError, classification, partitioned, sgd
from afflux.sim.clients.batches import batch_indices, take
from conftest import check_error, check_raises, check_refused

X, Y = own_tasks.X, own_tasks.Y
COLUMN = Y.numpy()[:, None]


def run(model=own_tasks.linear, x=X, y=Y, training=None, evaluate=own_tasks.TEST, clients=None, **settings):
    settings = {"rules": "fedbuff:buffer_size=3", "arrivals": 12, "concurrency": 3, "eval_every": 12} | settings
    clients = partitioned(x, y, 12, "iid") if clients is None else clients
    return Simulation(model, clients, training, evaluate, **settings).run()[0]


def test_the_last_batch_of_an_epoch_may_be_left_out():
    sizes = [len(batch) for batch in batch_indices(9, 4, 5, np.random.default_rng(0), drop_last=True)]
    assert sizes == [4] * 5
    assert [len(batch) for batch in batch_indices(3, 4, 2, np.random.default_rng(0), drop_last=True)] == [3, 3]

    def network():
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    clients = [(X[i::12][:17], Y[i::12][:17]) for i in range(12)]  # the second batch has one example
    with pytest.raises(TrainingError, match=r"more than 1 value per channel.*one example; drop_last=True leaves out"):
        run(network, clients=clients, training=sgd(epochs=1))
    result = run(network, clients=clients, training=sgd(epochs=2, drop_last=True))
    assert result.decisions == {"joined": 12}
    assert result.settings["drop_last"] is True


@pytest.mark.parametrize(
    "labels", [COLUMN, COLUMN.astype("i4"), Y.numpy().astype("u1"), torch.tensor(COLUMN).int()], ids=str
)
def test_labels_of_any_integers_and_in_a_column_give_the_same_bits(labels):
    evaluate = classification(X, labels)
    assert evaluate.y.dtype == torch.int64
    assert torch.equal(evaluate.y, Y)
    assert run(y=labels, evaluate=evaluate).digest == run(evaluate=evaluate).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": Y + 1}, r"outputs are of shape \(16, 3\) for labels from . to 3: .* labels from 0 to classes - 1"),
        ({"y": Y.float()}, r"for labels from 0.0 to 2.0 of dtype float32: .* classes - 1 of an integer dtype"),
        ({"model": lambda: nn.Linear(6, 1), "y": Y[:, None].float()}, "has one output for each example, .* give loss="),
        ({"x": (X * 40).to(torch.uint8)}, "x holds uint8, as images do: give x.float"),
        ({"model": lambda: Tuples(6, 3)}, "the model returns a tuple, not a tensor of outputs: give loss="),
    ],
)
def test_examples_and_labels_that_do_not_fit_are_named(change, message):
    check_error(message, run, evaluate=lambda model: (0.0, 0.0), error=TrainingError, **change)


class Tuples(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def test_images_of_an_evaluation_are_named():
    error = check_raises(RuntimeError, run, evaluate=classification((X * 40).to(torch.uint8), Y))
    assert "x holds uint8, as images do: give x.float() / 255, or the like" in error.__notes__


def test_a_data_loader_is_refused_by_name():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
    check_refused("data set is a DataLoader: give its dataset", run, clients=[loader] * 12)


class Items(list):
    """A Dataset of Hugging Face: its items are dicts of lists and numbers."""

    def __init__(self, x, y, label="label", **more):
        super().__init__({"x": row, label: int(kind)} | more for row, kind in zip(x, y, strict=True))


@pytest.mark.parametrize("kind", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.clone])
def test_items_that_are_dicts_give_the_same_bits(kind):
    clients = [(X[i::12], Y[i::12]) for i in range(12)]
    items = [Items(kind(x), y, "labels") for x, y in clients]
    assert run(clients=items).digest == run(clients=clients).digest


def test_columns_of_items():
    batch = np.array([2, 0])
    x, y = take(Items(X[:3].tolist(), Y[:3], mask=[1, 0]), batch)
    assert (y.tolist(), x["mask"].tolist()) == ([2, 0], [[1, 0], [1, 0]])
    assert x["x"].dtype == torch.float32
    check_refused("dicts with x, target, and without label", take, Items(X[:3].tolist(), Y[:3], "target"), batch)
    check_refused("column text .* holds str, must hold", take, Items(X[:3].tolist(), Y[:3], text="a word"), batch)
    check_refused("column image .* cannot be a batch: ", take, Items(X[:3].tolist(), Y[:3], image=object()), batch)
