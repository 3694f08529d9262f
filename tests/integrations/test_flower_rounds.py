"""Steps over a Grid of functions: as FedAvg makes a round, replayed to the same bits, of any dtype and rule."""

import random
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from afflux.integrations.flower import model_of, record_of
from afflux.rules import ca2fl, fadas, fedasync, fedavg, fedbuff, wkafl
from flower_grid import FakeGrid, adds, bad, flat, grid_of, initial, strategy
from role_trees import CONTAINERS, Container, bits_after_a_round, by_name, copies, torch_dict

RULES = [fedbuff(buffer_size=3), ca2fl(buffer_size=3), fadas(buffer_size=3)]


def test_a_synchronous_round_is_that_of_fedavg():
    """Fresh nodes, weighted by examples: ours rounds once, Flower's sums of K float32 terms K times."""
    start, values = initial(), (1.0, -2.0, 0.5, 3.0)
    theirs = FedAvg(fraction_evaluate=0.0, min_available_nodes=4, min_train_nodes=4)
    theirs = theirs.start(grid_of(*values), start, num_rounds=1)
    ours = strategy(fedavg(buffer_size=4)).start(grid_of(*values, most=10**9), start, num_rounds=1)
    largest = np.abs(flat(start)) + max(map(abs, values))
    assert np.all(np.abs(flat(ours.arrays) - flat(theirs.arrays)) <= 12 * np.finfo(np.float32).eps * largest)
    assert ours.train_metrics_clientapp[1]["train_loss"] == pytest.approx(1.0)
    assert list(ours.train_metrics_clientapp[1]) == list(theirs.train_metrics_clientapp[1])


def test_batch_norm_and_bfloat16():
    import ml_dtypes

    arrays = {
        "bn.weight": np.ones(4, np.float32),
        "bn.running_mean": np.zeros(4, np.float32),
        "bn.num_batches_tracked": np.array(0, np.int64),
        "half": np.ones(6, ml_dtypes.bfloat16),
    }

    def node(message):
        model = model_of(message.content["arrays"])
        assert [array.dtype for array in model.values()] == [array.dtype for array in arrays.values()]
        moved = {name: (array + np.array(1, array.dtype)).astype(array.dtype) for name, array in model.items()}
        return RecordDict({"arrays": record_of(moved), "metrics": MetricRecord({"num-examples": 1})})

    own = strategy(fedavg(buffer_size=2))
    result = own.start(FakeGrid({1: node, 2: node}), record_of(arrays), num_rounds=2)
    assert own.server.counts["joined"] == 4
    for name, array in model_of(result.arrays).items():
        assert array.dtype == arrays[name].dtype
        assert np.array_equal(np.asarray(array, np.float64), np.asarray(arrays[name], np.float64) + 2.0)


def test_rules_that_take_gradients():
    rule = wkafl(buffer_size=3, server_lr=0.5)
    with pytest.raises(RuntimeError, match="lacks client_lr or local_steps, and the settings do not say them"):
        strategy(rule, max_failures=1).start(grid_of(1.0, 2.0, 3.0), initial(), num_rounds=1)
    options = {"client_lr": 0.1, "local_steps": 5}
    assert strategy(rule, **options).start(grid_of(1.0, 2.0, 3.0), initial(), num_rounds=2).arrays
    nodes = {i: adds(1.0, **{"client-lr": 0.1, "local-steps": 5}) for i in range(3)}
    assert strategy(rule).start(FakeGrid(nodes), initial(), num_rounds=2).arrays


def test_a_step_that_no_reply_completes_is_noted():
    """flush_after makes it while the other node is silent; the result is the version that was evaluated last."""
    grid = FakeGrid({1: adds(1.0), 2: bad("lost")})
    own = strategy(fedbuff(buffer_size=100), concurrency=2, poll_interval=0.001, server_options={"flush_after": 0.02})
    models = {}

    def evaluate(step, arrays):
        models[step] = flat(arrays)
        time.sleep(0.03)  # meanwhile the arrivals that wait become due

    result = own.start(grid, initial(), num_rounds=5, evaluate_fn=evaluate)
    steps = sorted(models)
    assert (steps[0], steps[-1] >= 5) == (0, True)
    assert (flat(result.arrays) == models[steps[-1]]).all()
    with_metrics = set(result.train_metrics_clientapp)
    assert with_metrics
    assert with_metrics <= set(steps[1:])


def test_versions_are_bounded_over_many_replies():
    """10,000 replies, of which 1 per cent never come."""
    rng, good = random.Random(0), adds(0.001)

    def node(message):
        return None if rng.random() < 0.01 else good(message)

    held = []

    class Grid(FakeGrid):
        def pull_messages(self, keys):
            if own.server is not None:
                held.append((own.server.versions_held, len(own.server.tasks)))
            return super().pull_messages(keys)

    own = strategy(fedbuff(buffer_size=10), concurrency=20, timeout=0.2, poll_interval=0.001)
    own.start(Grid(dict.fromkeys(range(100), node), most=20), initial(), num_rounds=1000)
    assert own.server.counts["joined"] == 10_000
    assert own.lost["overdue"] > 10
    assert max(versions for versions, _ in held) <= 20 + 3
    assert max(tasks for _, tasks in held) <= 20


def test_numpy_files_are_read_in_place():
    array = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    record = record_of({"w": array, "f": np.asfortranarray(array), "s": np.array(3, np.int64), "e": np.empty((0, 2))})
    for name, own in model_of(record).items():
        assert np.array_equal(own, record[name].numpy())
        assert own.dtype == record[name].numpy().dtype
        assert not own.flags.writeable
    assert not model_of(record)["w"].flags.owndata
    fortran = Array(np.asfortranarray(array))
    assert np.array_equal(model_of(ArrayRecord({"f": fortran}))["f"], array)


@pytest.mark.parametrize("rule", [*RULES, fedasync(alpha=0.5)], ids=lambda rule: rule.name)
def test_records_and_state_dicts_give_one_digest(rule):
    """The same arrays in Flower's records, of torch and of NumPy, and in a state_dict."""
    torch_records = Container(lambda *own: model_of(ArrayRecord(torch_dict(*own))), by_name)
    records = Container(lambda *own: model_of(record_of(copies(*own))), by_name)
    containers = (CONTAINERS["state_dict"], torch_records, records)
    digests = [bits_after_a_round(container, rule) for container in containers]
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("rule", [fedbuff(buffer_size=2), fadas(buffer_size=2)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("place", ["settings", "train_config"])
def test_a_variance_in_a_list_of_arrays_stays_positive(rule, place):
    """As in `get_weights` of a Keras model, whose arrays have no names."""

    def node(message):
        reply = adds(1.0)(message)
        model = {**reply["arrays"], "1": Array(np.full(3, 1e-4, np.float32))}
        return RecordDict({"arrays": ArrayRecord(model), "metrics": reply["metrics"]})

    grid = FakeGrid(dict.fromkeys(range(1, 7), node))
    start = ArrayRecord([np.ones(2, np.float32), np.ones(3, np.float32)])
    if place == "settings":
        arrays = strategy(rule, roles={"1": "statistic"}).start(grid, start, num_rounds=9).arrays
    else:
        config = ConfigRecord({"roles": ["1=statistic"]})
        arrays = strategy(rule).start(grid, start, num_rounds=9, train_config=config).arrays
    assert arrays["1"].numpy() == pytest.approx(1e-4)
