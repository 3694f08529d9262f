"""The clients' optimizers against float64 NumPy on a linear model, and SCAFFOLD's c against its formulas."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rows
from afflux.aggregation.reports import Pulled
from afflux.arrays.layout import Layout
from afflux.ops import codecs
from afflux.rules.specs import parse_rule
from afflux.sim.clients.batches import batch_indices, take
from afflux.sim.clients.control_variates import ControlVariates
from afflux.sim.clients.flat_model import FlatModel, reproducible_libraries
from afflux.sim.clients.schedule import Dispatch, make_schedule
from afflux.sim.clients.training import Trainer, Training
from afflux.sim.loop import EventLoop
from afflux.sim.models import build_model
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.partitions import iid
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.selection import Population
from afflux.sim.workload.task import Partitioned, Task
from conftest import check_refused, generator
from made_runs import run

EPSILON = 2.0**-24
FEATURES, CLASSES = 4, 3
D = CLASSES * (FEATURES + 1)


def tiny():
    """Few features, all in [-1, 1], so that the bounds below are tight."""
    rng = generator(77)
    labels = np.arange(90) % CLASSES
    x = np.clip(0.5 * rng.standard_normal((90, 1, 2, 2)) + labels[:, None, None, None] / 2 - 0.5, -1, 1)
    x = x.astype(np.float32)
    return x, labels


X, Y = tiny()
CONFIG = SimConfig(task="python:tiny", client_lr=0.1, local_steps=4, batch_size=8, partition="iid", num_clients=20)


def data(shard):
    return X[shard].reshape(-1, FEATURES).astype(np.float64), Y[shard]


def logreg(rng):
    return build_model("logreg", (1, 2, 2), CLASSES, rng)


def trainer(config, shards):
    module = logreg(generator())
    model = FlatModel(module)
    x, y = torch.tensor(X), torch.tensor(Y)
    task = Task(module, [], Classification(x, y), validation=(x, y), seeds_torch=False)
    return Trainer(model, [(x[shard], y[shard]) for shard in shards], task, config), model.initial_params


def slope(params, x, y):
    """The gradient (d,) of the mean cross entropy of softmax(x W' + b), params = (W, b)."""
    weight, bias = params[: CLASSES * FEATURES].reshape(CLASSES, FEATURES), params[CLASSES * FEATURES :]
    logits = x @ weight.T + bias
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    return np.concatenate([(shares.T @ x).ravel(), shares.sum(axis=0)]) / len(y)


def literal(pulled, shard, config, steps, rng, extra):
    """K local steps, y <- y - lr (g + extra(y)), in float64."""
    x, y = data(shard)
    local = pulled.astype(np.float64)
    for batch in batch_indices(len(y), config.batch_size, steps, rng):
        local = local - config.client_lr * (slope(local, x[batch], y[batch]) + extra(local))
    return local


def bound(config, steps, largest=2.0, added=0.0):
    """|float32 - float64| in the 2-norm after `steps` steps, for params and extra terms of at most these magnitudes.

    An element of the gradient: 5 terms in each logit (pixels are below 1, params below `largest`), a softmax, which
    stretches nothing, with its exp, sum and quotient (10 roundings), and a mean over the batch. The step rounds twice.
    What was wrong before grows by 1 + lr L a step, L = |(x, 1)|^2 / 2 + what the extra terms add.
    """
    logit = (FEATURES + 2) * EPSILON * (FEATURES + 1) * largest
    element = logit + (10 + config.batch_size + 2) * EPSILON + 4 * EPSILON * (added + 2 * config.mu * largest)
    step = np.sqrt(D) * (config.client_lr * element + 2 * EPSILON * largest)
    growth = 1 + config.client_lr * ((FEATURES + 1) / 2 + config.mu + config.weight_decay)
    return step * sum(growth**k for k in range(steps))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"weight_decay": 0.5},
        {"client_optimizer": "fedprox", "mu": 2.0},
        {"client_optimizer": "fedasync", "mu": 2.0, "weight_decay": 0.5},
    ],
    ids=lambda change: "-".join(map(str, change.values())) or "sgd",
)
def test_each_client_optimizer_is_its_formula(change):
    config = replace(CONFIG, **change)
    shard = np.arange(30)
    worker, params = trainer(config, [shard])
    with reproducible_libraries():
        ours = worker.train(0, params, generator(3))
        plain = trainer(CONFIG, [shard])[0].train(0, params, generator(3))

    def extra(y):
        near = config.mu * (y - params) if config.client_optimizer != "sgd" else 0.0
        return near + config.weight_decay * y

    expected = literal(params, shard, config, 4, generator(3), extra)
    allowed = bound(config, 4)
    assert ours.steps == 4
    assert np.linalg.norm(params + ours.update - expected) <= allowed
    if change:
        assert np.linalg.norm(ours.update - plain.update) > 100 * allowed, "a missing term would be seen"


def test_scaffolds_shift_is_added_to_every_gradient():
    shard = np.arange(30)
    worker, params = trainer(replace(CONFIG, client_optimizer="scaffold"), [shard])
    shift = generator(8).standard_normal(D).astype(np.float32)
    with reproducible_libraries():
        ours = worker.train(0, params, generator(3), shift)
    expected = literal(params, shard, CONFIG, 4, generator(3), lambda y: shift.astype(np.float64)) - params
    assert np.linalg.norm(ours.update - expected) <= bound(CONFIG, 4, added=4.0) < 1e-3


def test_a_proximal_term_keeps_the_model_near_the_pulled_one():
    worker, params = trainer(CONFIG, [np.arange(30)])
    free = worker.train(0, params, generator(3)).update
    config = replace(CONFIG, client_optimizer="fedprox", mu=20.0)
    bound_one = trainer(config, [np.arange(30)])[0].train(0, params, generator(3)).update
    assert 0.1 * np.linalg.norm(free) < np.linalg.norm(bound_one) < 0.9 * np.linalg.norm(free)


@pytest.mark.parametrize("protocol", [{"concurrency": 4}, {"protocol": "rounds"}])
def test_scaffold_over_several_rounds_is_its_formulas(protocol, monkeypatch):
    """Clients, control variates and a FedBuff server once more in float64, over the same events."""
    made = []
    init = ControlVariates.__init__
    monkeypatch.setattr(ControlVariates, "__init__", lambda self, *args: (init(self, *args), made.append(self))[0])
    rule = parse_rule("fedbuff:buffer_size=3:staleness=constant")
    config = replace(
        CONFIG,
        client_optimizer="scaffold",
        local_steps=2,
        num_clients=5,
        arrivals=12,
        client_lr=0.05,
        **protocol,
        delays="fadas-mild",
    )
    clients = Partitioned(torch.tensor(X), torch.tensor(Y), 5, "iid")
    task = Task(logreg, clients, Classification(torch.tensor(X[:9]), torch.tensor(Y[:9])), seeds_torch=False)
    ours = run(rule, 7, config, task=task)
    (controls,) = made

    shards = iid(Y, 5, 0, random_stream(7, StreamPurpose.PARTITION))
    module = logreg(random_stream(7, StreamPurpose.MODEL))
    x = Layout.of(module).flatten(module).astype(np.float64)
    c, own, held, sent = np.zeros(D), np.zeros((5, D)), np.zeros((5, D)), {}
    models_sent, buffer, largest = [(x, c)], [], 0.0
    for event in make_schedule(rule, 7, config, Population(5, range(5))):
        if isinstance(event, Dispatch):
            age = min(event.age, len(models_sent) - 1)
            sent[event.sequence] = models_sent[-1 - age]
            continue
        pulled, c_pulled = sent[event.sequence]
        i = event.client
        rng = random_stream(7, StreamPurpose.BATCHES, event.sequence)
        y = literal(pulled, shards[i], config, 2, rng, lambda y, i=i, c=c_pulled: -own[i] + c)
        own[i] = own[i] - c_pulled + (pulled - y) / (2 * config.client_lr)
        largest = max(largest, np.abs(y).max(), np.abs(own).max())
        buffer.append((i, y - pulled, own[i] - held[i]))
        held[i] = own[i]
        if len(buffer) == 3:
            x = x + sum(u for _, u, _ in buffer) / 3
            c = c + sum(change for _, _, change in buffer) / 5
            models_sent.append((x, c))
            buffer = []
    # A step on a convex loss with lr < 2 / L stretches no error, so that those of the 12 trainings add up; what a c_i
    # carries of them, 2 / (K lr), comes back in K steps of lr: twice as much again.
    allowed = 3 * 12 * bound(config, 2, largest=largest, added=2 * largest)
    assert np.linalg.norm(c) > 0.1
    assert np.linalg.norm(ours.params - x) <= allowed < 1e-3
    for found, expected in [(controls.server, c), *((controls.client(i), own[i]) for i in range(5))]:
        assert np.linalg.norm(found - expected) <= 2 / (2 * config.client_lr) * allowed < 0.1 * np.linalg.norm(c)


def test_the_servers_control_is_the_mean_of_the_rows_however_often_clients_come():
    controls = ControlVariates(4, 8)
    zeros = controls.server
    own = np.zeros((8, 4), np.float32)
    rng = generator(5)
    for _ in range(200):
        before = controls.server.copy()
        for client in rng.integers(0, 8, size=5).tolist():
            shift = controls.shift(client, controls.server)
            assert np.array_equal(shift, controls.server - own[client])
            gradient = rng.standard_normal(4).astype(np.float32)
            controls.record_gradient(client, gradient, shift)
            own[client] = gradient - shift
            assert np.array_equal(controls.server, before), "c moves at steps only"
        controls.step()
        mean = own.astype(np.float64).mean(axis=0)
        # 1e-12 of the largest row is the cache's promise; one rounding to float32 on top.
        np.testing.assert_allclose(controls.server, mean, rtol=2 * EPSILON, atol=1e-11)
    assert not zeros.any(), "who holds an old c keeps it"


@pytest.mark.parametrize("codec", [codecs.affine(4), codecs.affine(1, scope="vector"), codecs.rotated(2)], ids=repr)
def test_controls_in_few_bits(codec):
    """What clients get back is the reference's row, keyed by the step; c is the mean of these rows."""
    seed, steps, gradients = 5, 40, generator(3).standard_normal((40, 3, 200)).astype(np.float32)
    controls, own = ControlVariates(200, 6, codec, seed), np.zeros((6, 200), np.float32)
    for step in range(steps):
        clients = [(step + k) % 6 for k in range(3)]
        for client, gradient in zip(clients, gradients[step], strict=True):
            shift = controls.shift(client, controls.server)
            assert np.array_equal(shift, controls.server - own[client])
            controls.record_gradient(client, gradient + shift, shift)
            own[client] = (gradient + shift) - shift
            assert np.array_equal(controls.client(client), own[client]), "unrounded until the step"
        controls.step()
        for client in clients:
            facts = rows.row_key(2**64 - 1 - seed, step + 1, client), float(own[client].min()), float(own[client].max())
            own[client] = rows.decode(codec.name, rows.encode(codec.name, own[client], *facts), 200)
            assert np.array_equal(controls.client(client), own[client])
        mean = own.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(controls.server, mean, rtol=2 * EPSILON, atol=1e-11 * np.abs(own).max())


def test_runs_with_controls_in_few_bits_repeat_and_differ():
    config = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=40, client_optimizer="scaffold")
    rule, few = parse_rule("fedbuff:buffer_size=4"), replace(config, control_codec="affine-2")
    first, again, exact = (run(rule, 0, each) for each in (few, few, config))
    assert first.digest == again.digest != exact.digest


def test_the_order_of_arrivals_between_two_steps_changes_no_bit():
    gradients = generator(2).standard_normal((6, 50)).astype(np.float32)
    results = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        controls = ControlVariates(50, 7, codecs.affine(2))
        for client in order:
            controls.record_gradient(client, gradients[client], controls.shift(client, controls.server))
        controls.step()
        results.append(controls.server.tobytes())
    assert results[0] == results[1]


def test_a_stale_model_comes_with_the_control_of_its_time():
    class Server:
        version = 0

        def pull(self):
            return SimpleNamespace(version=self.version)

    class Pulls(Training):
        def submit(self, sequence, finish, sent):
            pulled.append((sent.model.version, sent.shift[0]))

    pulled, server, controls = [], Server(), ControlVariates(2, 2)
    ages = [age for version in range(4) for age in (0, 1)]
    events = [Dispatch(float(number), number, 0, age) for number, age in enumerate([*ages, 4])]
    loop = EventLoop([server], Pulls(), lambda: events, client_lr=0.1, num_clients=2, stale_models=2, controls=controls)
    for number, _ in enumerate(loop, 1):
        server.version, controls.server = number // 2, np.full(2, number // 2, np.float32)
    assert pulled[:-1] == [(max(version - age, 0),) * 2 for version in range(4) for age in (0, 1)]
    assert pulled[-1] == (3, 3), "of two models that are kept, the older one"


def test_local_steps_are_drawn_uniformly_from_the_dispatchs_own_stream():
    config = replace(CONFIG, steps_law="uniform", local_steps=3, batch_size=2)
    worker, params = trainer(config, [np.arange(4)])
    with reproducible_libraries():  # one thread: with others, such short steps take much longer
        steps = [worker.train(0, params, random_stream(0, StreamPurpose.BATCHES, k)).steps for k in range(1200)]
    counts = np.bincount(steps, minlength=7)
    assert counts[0] == 0
    assert len(counts) == 7
    assert np.abs(counts[1:] - 200).max() < 5 * np.sqrt(200)


def test_one_step_of_sgd_has_its_stochastic_gradient():
    config = replace(CONFIG, local_steps=1, client_lr=0.5)
    worker, params = trainer(config, [np.arange(30)])
    with reproducible_libraries():
        trained = worker.train(0, params, generator(1))
    (batch,) = batch_indices(30, 8, 1, generator(1))
    x, y = data(np.arange(30))
    expected = slope(params.astype(np.float64), x[batch], y[batch])
    assert np.linalg.norm(trained.update / -0.5 - expected) <= bound(config, 1) / 0.5


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(60.0).reshape(5, 3, 2, 2),
        torch.arange(60.0).reshape(5, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(60.0).reshape(10, 6)[::2],
        torch.arange(5),
    ],
    ids=["contiguous", "channels last", "every other row", "numbers"],
)
def test_a_batch_has_the_rows_and_the_memory_format_that_indexing_gives(x):
    batch = np.array([3, 0, 3, 4])
    found, labels = take((x, torch.arange(5)), batch)
    expected = x[torch.from_numpy(batch)]
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert labels.tolist() == batch.tolist()


def test_examples_are_those_of_the_data_or_of_a_batch():
    for law, counts in (("data", [30, 5]), ("batch", [8, 5])):
        worker, params = trainer(replace(CONFIG, examples=law), [np.arange(30), np.arange(5)])
        assert [worker.train(i, params, generator()).num_examples for i in (0, 1)] == counts


def test_the_gradient_over_chosen_examples():
    worker, params = trainer(CONFIG, [np.arange(3)])
    examples = np.array([2, 50, 71])
    x, y = data(examples)
    ours = worker.rule_vector("validation", Pulled(params, 0), examples)
    assert np.linalg.norm(ours - slope(params.astype(np.float64), x, y)) <= bound(CONFIG, 1) / CONFIG.client_lr
    kept = ours.copy()
    worker.train(0, params, generator())
    assert np.array_equal(ours, kept), "a copy, not the trainer's own memory"


@pytest.mark.parametrize("optimizer", [{"client_optimizer": "fedprox", "mu": 1.0}, {"client_optimizer": "scaffold"}])
def test_runs_with_other_client_optimizers_repeat_bit_for_bit_and_differ(optimizer):
    config = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=40, local_steps=3)
    plain, first, again = (
        run(parse_rule("fedbuff:buffer_size=4"), 0, replace(config, **own)) for own in ({}, optimizer, optimizer)
    )
    assert first.digest == again.digest != plain.digest
    assert first.staleness.tolist() == plain.staleness.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client_optimizer": "adam"}, "unknown client optimizer 'adam'; known: fedasync, fedprox, scaffold, sgd"),
        ({"steps_law": "poisson"}, "unknown steps law"),
        ({"examples": "all"}, "unknown examples"),
        ({"mu": -1.0}, "mu is -1"),
        ({"control_codec": "int8", "client_optimizer": "scaffold"}, "unknown control codec 'int8'; known: affine-1, "),
    ],
)
def test_impossible_settings_are_refused(change, message):
    check_refused(message, SimConfig, **change)
