"""Local SGD against torch's own optimizer, the three kinds of results, and the batches."""

import numpy as np
import pytest
import torch

from afflux.sim.clients.batches import batch_indices
from afflux.sim.clients.flat_model import FlatModel, reproducible_libraries
from afflux.sim.clients.training import Trainer
from afflux.sim.data import read_data_set
from afflux.sim.models import build_model
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Task
from conftest import generator

SHARDS = [np.arange(0, 23), np.arange(23, 26)]


def shards_of(data, shards):
    x_train, _ = data.scaled()
    return [(torch.tensor(x_train[shard]), torch.tensor(data.y_train[shard])) for shard in shards]


def task_of(data):
    test = Classification(torch.tensor(data.scaled()[1]), torch.tensor(data.y_test))
    return Task(torch.nn.Identity(), [], test, seeds_torch=False)


def trainer(config):
    task = read_data_set("digits")
    module = build_model(config.model, task.shape, 10, generator())
    model = FlatModel(module)
    return Trainer(model, shards_of(task, SHARDS), task_of(task), config), model.initial_params


def reference(config, client, steps, seed):
    """The same work with torch.optim on a module of its own: params, and the mean loss over all examples."""
    task = read_data_set("digits")
    module = build_model(config.model, task.shape, 10, generator())
    optimizer = torch.optim.SGD(module.parameters(), lr=config.client_lr, weight_decay=config.weight_decay)
    x, y = (torch.tensor(array[SHARDS[client]]) for array in (task.scaled()[0], task.y_train))
    losses = []
    for batch in batch_indices(len(y), config.batch_size, steps, generator(seed)):
        optimizer.zero_grad()
        each = torch.nn.functional.cross_entropy(module(x[batch]), y[batch], reduction="none")
        each.mean().backward()
        optimizer.step()
        losses += each.tolist()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy(), np.mean(losses)


def test_batches_are_shuffled_epochs():
    drawn = list(batch_indices(10, 4, 7, generator()))
    assert [len(batch) for batch in drawn] == [4, 4, 2, 4, 4, 2, 4]
    for epoch in (drawn[:3], drawn[3:6]):
        assert sorted(np.concatenate(epoch)) == list(range(10))
    assert not np.array_equal(np.concatenate(drawn[:3]), np.concatenate(drawn[3:6]))
    assert [len(batch) for batch in batch_indices(3, 16, 2, generator())] == [3, 3]


@pytest.mark.parametrize("model", ["logreg", "cnn"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_local_sgd_is_torchs(model, weight_decay):
    config = SimConfig(model=model, local_steps=4, batch_size=8, weight_decay=weight_decay)
    worker, params = trainer(config)
    with reproducible_libraries():
        trained = worker.train(0, params, generator(3))
        expected, loss = reference(config, 0, 4, 3)
    np.testing.assert_allclose(params + trained.update, expected, rtol=0, atol=1e-6)
    assert np.abs(trained.update).max() > 1e-3
    assert trained.num_examples == 23
    assert trained.loss == pytest.approx(loss, rel=1e-6)


def test_the_pulled_params_are_not_written_to():
    worker, params = trainer(SimConfig(model="logreg", local_steps=3, client_lr=0.25))
    before = params.copy()
    worker.train(0, params, generator(1))
    assert np.array_equal(params, before)


def test_local_epochs_count_the_clients_own_batches():
    config = SimConfig(model="logreg", local_epochs=2, batch_size=8)
    worker, params = trainer(config)
    # 23 samples are 3 batches, 3 samples are one.
    for client, steps in ((0, 6), (1, 2)):
        with reproducible_libraries():
            trained = worker.train(client, params, generator(5))
        expected, _ = reference(config, client, steps, 5)
        np.testing.assert_allclose(params + trained.update, expected, rtol=0, atol=1e-6)


def test_evaluation_is_of_the_given_params_on_the_test_part():
    worker, params = trainer(SimConfig(model="logreg"))
    task = read_data_set("digits")
    weight, bias = params[:640].reshape(10, 64), params[640:]
    logits = task.scaled()[1].reshape(-1, 64).astype(np.float64) @ weight.T + bias
    worker.train(0, params, generator())
    accuracy, loss = worker.evaluate(params)
    assert accuracy == (logits.argmax(1) == task.y_test).mean()
    normaliser = np.log(np.exp(logits).sum(1))
    expected = (normaliser - logits[np.arange(len(logits)), task.y_test]).mean()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_threads_of_the_caller_are_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with reproducible_libraries():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
