"""Models whose forward keeps state: nothing passes from one training to the next but what the server sends."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import made_runs
import own_tasks
import stateful_models
from afflux.lab import Simulation
from afflux.lab.runs.setup import RunSetup
from afflux.sim import ConfigError
from afflux.sim.clients.flat_model import FlatModel, make_module, reproducible_libraries
from afflux.sim.clients.schedule import Arrival
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from conftest import bits, check_raises, check_refused, reproducible
from made_runs import CLIENTS, paused_run, resume, run, run_in_store
from pairwise import soak_all
from stopped_runs import Stopped, stop_at

COHORT, ROUNDS = 3, 3
KINDS = ["everything", *soak_all([(kind,) for kind in stateful_models.KINDS if kind != "everything"])]


def simulation(model, training=own_tasks.momentum, **settings):
    """A synchronous run: the cohorts of its rounds are seen in the order of the arrivals."""
    settings = {"rules": "fedavg:buffer_size=3", "arrivals": COHORT * ROUNDS, "eval_every": COHORT} | settings
    return made_runs.simulation(training, model=model, **settings)


def with_models(made):
    """The models that a simulation evaluates, which are added to a list."""
    models, evaluate = [], made.task.evaluate
    made.task = replace(made.task, evaluate=lambda model: (models.append(copy.deepcopy(model)), evaluate(model))[1])
    return models


def plain_loop(made):
    """Params and buffers after the rounds: each client trains in a new module; means are made in float64."""
    setup = RunSetup(made.config, 0, made.task)
    data = CLIENTS.for_seed(0)
    arrivals = [event for event in setup.schedule(made.jobs[0].spec) if isinstance(event, Arrival)]
    state, trained = make_module(made.task.model, 0).state_dict(), {"head.weight", "head.bias"}
    trained |= {"kinds.5.norm.weight", "kinds.5.norm.bias", "kinds.0.norm.weight", "kinds.0.norm.bias"}
    for number in range(0, len(arrivals), COHORT):
        states = []
        for arrival in arrivals[number : number + COHORT]:
            module = make_module(made.task.model, 0)
            module.load_state_dict(state)
            rng = random_stream(0, StreamPurpose.BATCHES, arrival.sequence)
            rng.integers(2**63)  # seeds torch
            own_tasks.momentum(module, data[arrival.client], rng, client_lr=0.1, local_steps=3)
            states.append(copy.deepcopy(module.state_dict()))
        means = {name: sum(each[name].double() for each in states) / COHORT for name in state}
        state = {
            name: state[name] if ".frozen." in name else (mean if state[name].is_floating_point() else mean.round())
            for name, mean in means.items()
        }
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_params_and_statistics_are_those_of_a_plain_loop(kind, tmp_path):
    made = simulation(stateful_models.MODELS[kind])
    models = with_models(made)
    (result,) = made.run()
    with reproducible_libraries():
        expected = plain_loop(made)
    state = models[-1].state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        # A mean of three in float64, rounded once by the module at each of three rounds.
        np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert state["seen"] == 8 * 3 * ROUNDS, "eight examples in each of three steps"
    assert not result.decisions.keys() - {"joined"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_ends_with_the_same_bits(kind, tmp_path):
    settings = {"rules": "fedbuff:buffer_size=2", "concurrency": 5, "arrivals": 20}
    made = simulation(stateful_models.MODELS[kind], own_tasks.fails_sometimes, **settings)
    rule = made.jobs[0].spec
    audit = [tmp_path / name / "audit" for name in ("whole", "run")]
    for folder in audit:
        folder.mkdir(parents=True)
    whole = run(rule, 0, made.config, output=audit[0], task=made.task)

    def stop(progress):
        if progress.arrivals == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_store(tmp_path / "store", rule, 0, made.config, audit[1], stop, 0.0, task=made.task)
    result = resume(paused_run(tmp_path / "store"), task=made.task)
    assert reproducible(result) == reproducible(whole)
    logs = [next(folder.glob("*.jsonl")).read_bytes() for folder in audit]
    assert logs[0] == logs[1]


@pytest.mark.soak
@pytest.mark.parametrize("kind", stateful_models.KINDS)
def test_two_workers_give_the_bits_of_one_process(kind):
    """In the normal suite: test_workers.py, for a model with everything."""
    made = simulation(stateful_models.MODELS[kind], rules="fedbuff:buffer_size=2", concurrency=5, arrivals=20)
    one, two = (made.run(workers=count)[0] for count in (1, 2))
    assert reproducible(one) == reproducible(two)


class Holding(nn.Module):
    """A linear layer, and one more array."""

    def __init__(self, change=None, **arrays):
        super().__init__()
        self.linear = nn.Linear(own_tasks.FEATURES, own_tasks.CLASSES)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self._change = change
        for name, array in arrays.items():
            self.register_buffer(name, array)

    def forward(self, x):
        if self._change is not None and self.training:
            self._change(self)
        return self.linear(x)


def changes(name, value):
    return lambda module: setattr(module, name, value(getattr(module, name)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changes("n", lambda n: torch.ones(4)),
            r"buffer n was torch.float32 of shape \(2,\) before training, and is torch.float32 of shape \(4,\) after",
        ),
        (changes("n", lambda n: n.double()), r"is torch.float64 of shape \(2,\) after it: .* persistent=False"),
        (changes("n", lambda n: None), "buffer n is a NoneType after training"),
        (changes("m", lambda m: m + 1), "buffer n has other values after training in another module that shares it"),
        (changes("teacher", copy.deepcopy), "the training replaced parameter teacher.weight"),
        (lambda module: setattr(module.teacher.weight, "data", torch.ones(2, 2)), "parameter teacher.weight requires"),
        (lambda module: module.teacher.bias.data.mul_(0.5), "parameter teacher.bias requires no gradient, but has"),
        (changes("linear", copy.deepcopy), "the training replaced parameter linear.weight"),
    ],
)
def test_what_cannot_be_followed_is_named(change, message):
    buffer = torch.ones(2)
    check_refused(message, simulation(lambda: Holding(change, n=buffer, m=buffer)).run)


def test_gradients_modes_and_requires_grad_do_not_pass_to_the_next_client():
    """Training without zero_grad, which leaves the module in another mode and a part of it frozen."""
    seen = []

    def train(model, data, rng):
        seen.append((model.linear.bias.grad, model.training, model.linear.weight.requires_grad))
        model(data[0]).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.eval().linear.weight.requires_grad = False
        return 1.0, 1, len(data[1])

    simulation(Holding, train).run()
    assert seen == [(None, True, True)] * COHORT * ROUNDS


def test_an_evaluation_may_fill_tables_and_train():
    """It tunes the model first. The next training begins with the params of the server, and uses the table."""

    def tuned(model):
        with torch.enable_grad():
            nn.functional.cross_entropy(model(own_tasks.X), own_tasks.Y).backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
        return own_tasks.TEST(model)

    made = simulation(stateful_models.MODELS["grown"])
    (plain,) = made.run()
    made.task = replace(made.task, evaluate=tuned)
    (result,) = made.run()
    assert result.digest == plain.digest
    assert result.evaluations[-1].loss < plain.evaluations[-1].loss


def test_arrays_that_torch_cannot_copy_or_read_are_named():
    check_refused(r"^0.weight is not initialised: run one forward first", FlatModel, nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ConfigError, match=r"^0.running_mean is not initialised: run one forward first"):
        FlatModel(nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(2, 2)))
    model = Holding()
    model.linear.last = model(own_tasks.X)
    check_refused(r"cannot be copied: linear.last is a result .*; pass a function that makes", make_module, model, 0)
    model.linear.last = open(__file__)  # noqa: SIM115
    with model.linear.last, pytest.raises(ConfigError, match=r"cannot be copied: cannot pickle .*; pass a function"):
        make_module(model, 0)
    check_refused("buffer n is on meta, must be on the CPU", FlatModel, Holding(n=torch.ones(3, device="meta")))
    check_refused(r"buffer n is torch.sparse_coo, must be dense", FlatModel, Holding(n=torch.eye(3).to_sparse()))


def test_attributes_that_cannot_be_written_are_left_alone():
    model = FlatModel(Holding())
    model.module.sparse, model.module.wide = torch.eye(3).to_sparse(), torch.ones(1).expand(3)
    with torch.inference_mode():
        model.module.fixed = torch.ones(3)
    model.module.itself = [model.module]
    model.module.table = np.broadcast_to(1.0, 3)
    again = FlatModel(model.module)
    again.load(again.initial_params)
    assert again.module.itself == [model.module]


def test_a_buffer_that_numpy_has_no_dtype_for_is_averaged():
    made = simulation(lambda: Holding(changes("n", lambda n: n * 2), n=torch.ones(2, dtype=torch.bfloat16)))
    models = with_models(made)
    made.run()
    assert models[-1].n.tolist() == [2.0 ** (3 * ROUNDS)] * 2


def test_an_expanded_buffer_gets_memory_of_its_own():
    model = FlatModel(Holding(n=torch.ones(1).expand(3)))
    model.load(model.initial_params, np.array([1.0, 2.0, 3.0]))
    assert model.module.n.tolist() == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_a_scripted_module_is_followed_by_name():
    model = FlatModel(torch.jit.script(nn.Sequential(stateful_models.Counter(), nn.Linear(6, 3))))
    for _ in range(2):
        model.load(model.initial_params, model.initial_buffers)
        model.module(own_tasks.X)
        assert model.buffers().tolist() == [1]


def test_the_generators_of_numpy_and_python_are_seeded_around_a_users_code(tmp_path):
    """One result from any state of them, with workers, and after a resume; their states are restored."""
    model = nn.Linear(own_tasks.FEATURES, own_tasks.CLASSES)
    made = Simulation(
        model,
        stateful_models.noisy,
        evaluate=stateful_models.noisy_evaluation,
        num_clients=6,
        concurrency=2,
        arrivals=12,
        eval_every=4,
        rules="fedbuff:buffer_size=2",
    )
    results, folders = [], {"out": tmp_path / "run", "store": tmp_path / "store"}
    for number, options in enumerate(({}, {}, {"workers": 2}, folders)):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002 - the one that all code shares
        before = random.getstate(), bits(np.random.get_state()[1])  # noqa: NPY002
        if options is folders:
            check_raises(Stopped, made.run, **folders, checkpoint_every=0.0, watch=stop_at(7))
            results += made.run(**folders)
        else:
            results += made.run(**options)
        assert (random.getstate(), bits(np.random.get_state()[1])) == before  # noqa: NPY002
    assert len({(result.digest, tuple(result.evaluations)) for result in results}) == 1
