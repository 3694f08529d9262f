"""docs/guides/pfl.md: its code runs in pfl's own simulation, beside pfl's FedAvg."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.metrics import Weighted
        from pfl.model.pytorch import PyTorchModel
except ImportError as missing:
    pytest.skip(f"needs pfl: make test-integrations ({missing})", allow_module_level=True)

from afflux import rules
from conftest import check_error

pytestmark = pytest.mark.filterwarnings("default")
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "pfl.md"
SIZE, USERS, COHORT, ROUNDS, RATE = 12, 9, 4, 5, 0.25
U32 = 2.0**-24


class Point(torch.nn.Module):
    """A user pulls it toward the mean of its own points, elementwise."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, SIZE).reshape(3, 4))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def loss(self, x, is_eval=False):
        return 0.5 * (self.w.reshape(-1) - x.mean(0)).square().sum()

    def metrics(self, x):
        return {"loss": Weighted(self.loss(x).item(), 1)}


def a_model():
    module = Point()
    return PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))


def points(user):
    """1 to 3 of them: the users differ in how many they have."""
    rng = np.random.default_rng(user)
    return rng.uniform(-3, 3, (1 + user % 3, SIZE)).astype(np.float32)


def data():
    order = iter(np.random.default_rng(1).permutation(USERS).tolist() * 10)
    return FederatedDataset(lambda user: Dataset([points(user)], user_id=str(user)), lambda: next(order))


PARAMS = NNAlgorithmParams(
    central_num_iterations=ROUNDS, evaluation_frequency=100, train_cohort_size=COHORT, val_cohort_size=None
)
TRAIN = NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=None)


def page():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def averaging():
    names = {}
    exec(compile(page()[0], "pfl.md", "exec"), names)
    return names["ServerAveraging"]


def run(algorithm, model, **options):
    backend = SimulatedBackend(data(), data(), **options)
    algorithm.run(PARAMS, backend, model, TRAIN)
    return model.pytorch_model.w.detach().numpy().ravel()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_page_equals_pfls_fedavg(weighted, averaging):
    """Let E be the difference so far, L the largest number, u = 2**-24 and a the users' learning rate.

    A user's update is -a (x - c), so two versions that differ by E give updates that differ by a E, after six roundings
    (the mean of its points, x - c, its product with a, x - that, the difference, in pfl its weight) of at most 2 L in
    both runs. pfl then rounds K partial sums of at most 2 K L before it divides by K (or by the number of points, which
    is larger), and twice more; afflux rounds once. So E grows to E (1 + a) + 2 L u (K + 16) at most.
    """
    theirs = run(FederatedAveraging(), a_model(), postprocessors=[WeightByDatapoints()] if weighted else [])
    rule = rules.fedavg(buffer_size=COHORT) if weighted else rules.fedbuff(buffer_size=COHORT)
    model = a_model()
    start = model.pytorch_model.w.detach().numpy().ravel().copy()
    algorithm = averaging(rule, model)
    ours = run(algorithm, model, aggregator=algorithm)
    assert algorithm.server.version == ROUNDS
    largest, bound = max(np.abs(points(user)).max() for user in range(USERS)), 0.0
    for _ in range(ROUNDS):
        bound = bound * (1 + RATE) + 2 * largest * U32 * (COHORT + 16)
    assert np.abs(ours - theirs).max() <= bound
    assert np.abs(ours - start).max() > 1000 * bound
    assert np.array_equal(ours, algorithm.server.params)
    assert model.pytorch_model.frozen.tolist() == [1.0, 1.0]


def test_the_weights_are_the_rules_and_not_a_postprocessors(averaging):
    models = [a_model(), a_model()]
    first, second = (averaging(rules.fedavg(buffer_size=COHORT), model) for model in models)
    plain = run(first, models[0], aggregator=first)
    weighted = run(second, models[1], aggregator=second, postprocessors=[WeightByDatapoints()])
    # A weight of 3 is multiplied by and divided by again, which rounds twice.
    assert np.abs(plain - weighted).max() <= 40 * U32 * np.abs(plain).max()


@pytest.mark.parametrize("size", [3, 4, 6])
def test_cohorts_of_another_size_than_the_buffer(size, averaging):
    """Users arrive stale, or wait for the next cohort; rows of CA2FL are those of the users."""
    model = a_model()
    algorithm = averaging(rules.ca2fl(buffer_size=size), model, num_clients=USERS, log=True)
    run(algorithm, model, aggregator=algorithm)
    server = algorithm.server
    assert server.version == COHORT * ROUNDS // size
    assert server.arrivals_waiting == COHORT * ROUNDS % size
    assert set(server.rows.client_ids) <= {str(user) for user in range(USERS)}
    assert (max(entry.staleness for entry in server.log) > 0) == (size != COHORT)


def test_a_users_nan_is_named(averaging, monkeypatch):
    monkeypatch.setitem(globals(), "points", lambda user: np.full((1, SIZE), np.nan if user == 3 else 1.0, np.float32))
    model = a_model()
    algorithm = averaging(rules.fedavg(buffer_size=COHORT), model)
    check_error("client '3''s update has a non-finite value at index 0", run, algorithm, model, aggregator=algorithm)
    algorithm = averaging(rules.fedavg(buffer_size=COHORT), model := a_model(), faults="record")
    assert np.isfinite(run(algorithm, model, aggregator=algorithm)).all()
    assert algorithm.server.counts["faulty"] > 0


def test_the_page_runs(averaging, capsys):
    """Both blocks, one after the other; what they print stands beside them."""
    names = {"model": a_model(), "training_data": data(), "val_data": data(), "params": PARAMS, "train_params": TRAIN}
    names["cohort_size"] = COHORT
    promised = []
    for block in page():
        exec(compile(block, "pfl.md", "exec"), names)
        promised += re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines()[-len(promised) :] == promised
