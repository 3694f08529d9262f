"""NVFlare's Collab over sites that are functions: its own FedBuff, and runs replayed to the same bits."""

import numpy as np
import pytest
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

from afflux import Server, replay
from afflux.integrations._core import TrainingRun
from afflux.rules import ca2fl, fadas, fedbuff
from nvflare_servers import NAMES, four, initial, run, small
from nvflare_sites import Sites, adds, flat

ROUNDING = 2.0**-24  #: relative error of one operation in float32


@pytest.fixture
def received(monkeypatch):
    """What has joined, by the number of the join, and all versions."""
    models, versions, receive = {}, {}, TrainingRun.receive

    def noted(self, key, read):
        versions[self.server.version] = np.array(self.server.params)
        kept = []

        def reading():
            kept.append(read())
            return kept[0]

        receipt = receive(self, key, reading)
        versions[self.server.version] = np.array(self.server.params)
        if receipt is not None and receipt.join is not None:
            models[receipt.join] = {name: np.array(array) for name, array in kept[0].arrays.items()}
        return receipt

    monkeypatch.setattr(TrainingRun, "receive", noted)
    return models, versions


def joins(server):
    return [entry for entry in server.log if hasattr(entry, "staleness")]


@pytest.mark.parametrize("weighted", [True, False])
def test_its_dialect_of_fedbuff_is_its_manager_of_buffers(weighted, received, monkeypatch):
    """A step of theirs: at most M + 4 operations in float32 on numbers up to the largest update U, then float64; of
    ours: exact weights and sums, and one rounding of params, up to X. Updates do not depend on params.
    """
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext
    from nvflare.edge.assessors.buff_model_manager import BuffModelManager
    from nvflare.edge.mud import ModelUpdate

    size, steps, rng = 4, 12, np.random.default_rng(5)

    def site(model, version):
        return {name: rng.standard_normal(array.shape, np.float32) for name, array in model.items()}

    knobs = {"num_updates_for_model": size, "global_lr": 0.7, "staleness_weight": weighted}
    ours = small(
        "fedbuff", knobs, steps, params_type="DIFF", settings={"concurrency": 7, "server_options": {"log": True}}
    )
    result = run(ours, Sites({f"site-{i}": site for i in range(8)}, seed=2), monkeypatch)

    theirs, context = BuffModelManager(**knobs), FLContext()
    theirs.fire_event = lambda event, fl_ctx: None
    theirs.initialize_model(DXO(DataKind.WEIGHTS, data=initial()), context)
    theirs.generate_new_model(context)  # their version 1 is the initial model
    updates, versions = received
    for join in joins(ours.server):
        delta = {name: array.copy() for name, array in updates[join.number].items()}
        diff = DXO(DataKind.WEIGHT_DIFF, data={"dict": delta, "count": 1})
        theirs.process_updates(
            {join.version + 1: ModelUpdate(join.version + 1, diff.to_shareable(), {str(join.number): 0.0})}, context
        )
    assert theirs.current_model_version == steps + 1
    assert max(join.staleness for join in joins(ours.server)) > 1
    largest_update = max(np.abs(flat(update)).max() for update in updates.values())
    largest = max(np.abs(version).max() for version in versions.values())
    bound = steps * ROUNDING * ((size + 4) * largest_update + largest)
    found = {name: np.array(array) for name, array in theirs.current_model.data.items()}
    assert np.abs(flat(result).astype(np.float64) - flat(found)).max() <= bound < 1e-4


def test_steps_weighted_by_local_steps_are_those_of_its_example(received, monkeypatch):
    """Its example of FedBuff adds the mean, weighted by num_steps, of what clients added to the versions that they had:
    M + 2 operations in float32 on numbers up to the largest update U, and two on params up to X; ours: one rounding.
    """
    size, steps = 3, 6
    ours = small("fedavg", {"buffer_size": size}, steps, settings={"server_options": {"log": True}})
    run(ours, four(1.0, -2.0, 0.5, 3.0, seed=4), monkeypatch)
    models, versions = received
    helper, log = WeightedAggregationHelper(), joins(ours.server)
    assert max(join.staleness for join in log) > 0
    for step in range(steps):
        largest = np.abs(versions[step]).max()
        for join in log[step * size : (step + 1) * size]:
            delta = flat(models[join.number]) - versions[join.version]
            largest = max(largest, np.abs(delta).max())
            helper.add({"x": delta}, float(join.num_examples), join.client_id, step)
        theirs = versions[step] + helper.get_result()["x"]
        bound = ROUNDING * ((size + 2) * largest + 3 * 2 * largest)
        assert np.abs(versions[step + 1] - theirs).max() <= bound


@pytest.mark.parametrize("params_type", ["FULL", "DIFF"])
@pytest.mark.parametrize("rule", [fedbuff, ca2fl, fadas], ids=lambda rule: rule.__name__)
def test_a_run_replays_to_the_same_bits(rule, params_type, received, monkeypatch):
    def difference(value):
        full = adds(value)

        def site(model, version):
            moved, metrics = full(model, version)
            return {name: array - model[name] for name, array in moved.items()}, metrics

        return site

    values = (1.0, -2.0, 0.5, 3.0)
    sites = four(*values, seed=3)
    if params_type == "DIFF":
        sites = Sites({name: difference(value) for name, value in zip(NAMES, values, strict=True)}, seed=3)
    own = small(rule(buffer_size=3), rounds=6, params_type=params_type, settings={"server_options": {"log": True}})
    result = run(own, sites, monkeypatch)
    models, versions = received
    server = own.server
    assert server.version == 6
    assert max(join.staleness for join in joins(server)) > 0
    fresh = Server(rule(buffer_size=3), initial(), log=True, num_clients=server.options.num_clients, faults="record")

    def update(join):
        base = fresh.layout.views(versions[join.version])
        return {
            name: array - base[name] if params_type == "FULL" else array for name, array in models[join.number].items()
        }

    again = replay(server.log, fresh, update)
    assert again.params.tobytes() == server.params.tobytes() == flat(result).tobytes()
