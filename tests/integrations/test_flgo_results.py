"""FLGo's server with afflux's aggregation: against FLGo's FedBuff, replayed bits, and rules of every kind."""

import numpy as np
import pytest

import flgo_points as points
from afflux.integrations.flgo import BasicClient, algorithm
from afflux.rules import ca2fl, fadas, fedasync, fedavg, fedbuff, wkafl
from flgo_points import OPTIONS, flgo, torch
from flgo_runs import flat, in_a_folder, started  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # FLGo's and torch's own

U32 = 2.0**-24
RULES = [fedbuff(buffer_size=3), ca2fl(buffer_size=3), fadas(buffer_size=3)]


def order_of(server):
    """Notes the clients of the packages that a server class handles, in their order."""
    seen, handle = [], server.package_handler

    def noted(self, received):
        seen.extend(map(int, received["__cid"]))
        return handle(self, received)

    server.package_handler = noted
    return seen


def test_a_run_equals_flgos_fedbuff():
    """The same clients train at the same times; the two runs differ by rounding, which the clients' training damps.

    Let E be the largest difference so far, L the largest number, u = 2**-24, a = 0.2 the clients' learning rate. A
    client's model is x - a (x - c): of two versions that differ by E it makes updates that differ by a E, and rounds
    three times. FLGo rounds each update and its product with the weight (s <= 1), each of M partial sums of at most
    2 M L, and three times more; afflux rounds the update and the result. Each rounding is of numbers of at most 2 L
    after the division by M, so a round adds at most r = 2 L u (M + 16): E grows to E (1 + a) + r.
    """
    rounds, size, eta = 14, 3, 1.0
    theirs = flgo.algorithm.fedbuff
    own = type("fedbuff", (), {name: type(name, (getattr(theirs, name),), {}) for name in ("Server", "Client")})
    expected_order = order_of(own.Server)
    expected = started(own, algo_para=[size / 6, eta], num_rounds=rounds)
    expected.run()

    chosen = algorithm({"name": "fedbuff", "dialect": "flgo", "buffer_ratio": size / 6, "eta": eta})
    order = order_of(chosen.Server)
    runner = started(chosen, num_rounds=rounds)
    start = flat(runner.model)
    runner.run()
    assert order == expected_order
    assert runner.server.version == rounds
    assert runner.server.counts["joined"] == size * rounds
    output, expected_output = runner.gv.logger.output, expected.gv.logger.output
    assert output["time"] == expected_output["time"]
    assert max(output["step_staleness_max"]) > 0

    largest = max(points.train_data.tensors[0].abs().max().item(), abs(start).max())
    rate, bound = OPTIONS["learning_rate"], 0.0
    for _ in range(rounds):
        bound = bound * (1 + rate) + 2 * largest * U32 * (size + 16)
    assert np.abs(flat(runner.model) - flat(expected.model)).max() <= bound
    assert np.abs(flat(runner.model) - start).max() > 100 * bound
    assert np.array_equal(flat(runner.model), runner.server.params)


def test_batch_norm():
    """Statistics are averaged, not stepped with, and the counter stays an integer."""

    class Norm(flgo.utils.fmodule.FModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.BatchNorm1d(4)

    class Client(BasicClient):
        def train(self, model):
            model.layer.weight.data += 1
            model.layer.running_mean += self.id
            model.layer.num_batches_tracked += 2

    class Model:
        @staticmethod
        def init_global_module(party):
            if "Server" in type(party).__name__:
                party.model = Norm()

    runner = started(
        algorithm(fedavg(buffer_size=3), client=Client), clients=3, model=Model, num_rounds=2, eval_interval=0
    )
    runner.run()
    norm = runner.model.layer
    assert runner.server.version == 2
    assert norm.weight.tolist() == [3.0] * 4
    assert norm.running_mean.tolist() == [2.0] * 4  # 0 + (0 + 1 + 2) / 3, twice
    assert (norm.num_batches_tracked.item(), norm.num_batches_tracked.dtype) == (4, torch.int64)


def test_rules_of_every_kind_get_what_they_need():
    """Models, and gradients with the learning rate and the steps of FLGo's clients."""
    runner = started(algorithm(fedasync(alpha=0.5)))
    runner.run()
    assert runner.server.version == 6
    runner = started(algorithm(wkafl(buffer_size=2, server_lr=0.3), server_options={"log": True}), num_steps=2)
    runner.run()
    assert runner.server.version == 6
    assert np.isfinite(runner.server.params).all()


def test_clients_in_threads():
    first = started(algorithm(fedbuff(buffer_size=2)))
    first.run()
    second = started(algorithm(fedbuff(buffer_size=2)), num_parallels=3, parallel_type="t")
    second.run()
    assert second.server.params.tobytes() == first.server.params.tobytes()
