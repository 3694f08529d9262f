"""Rounds of FLGo's server: one for each step, the clients that FLGo draws, and when a run ends."""

import numpy as np
import pytest

import flgo_points  # noqa: F401  # first: it skips these tests where FLGo is not installed
from afflux.integrations.flgo import algorithm
from afflux.rules import fedbuff, gsgm
from flgo_runs import flat, in_a_folder, simulator, started  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # FLGo's and torch's own


def test_every_step_is_a_round():
    """Packages that arrive at one time make several steps: each is logged, evaluated and stored as a round."""
    runner = started(
        algorithm(fedbuff(buffer_size=2)),
        simulator=simulator(apart=False, latencies=(3,)),
        num_rounds=7,
        save_optimal=True,
    )
    runner.run()
    output = runner.gv.logger.output
    assert runner.server.version == 7
    assert output["step_version"] == [1, 2, 3, 4, 5, 6, 7]
    assert len(output["test_distance"]) == 8  # with that of the initial model
    assert len(set(output["time"])) < 7
    assert output["counts"]["joined"] == 14
    assert np.array_equal(flat(runner.model), runner.server.params)


def test_a_client_drawn_twice_at_a_time_counts_once():
    """FLGo's sampling with replacement hands its package over twice."""
    runner = started(algorithm(fedbuff(buffer_size=2)), sample="md", num_rounds=20)
    runner.run()
    assert runner.lost["unknown"] > 0
    assert runner.server.counts["joined"] == 40


def test_clients_that_have_entered_in_the_pass_are_not_drawn():
    """Under gsgm each client takes part once in a pass."""
    runner = started(algorithm(gsgm(buffer_size=2)), num_rounds=20, proportion=0.5)
    pack, most = runner.pack, []

    def noted(client, *args, **kwargs):
        entered = runner.server.clients
        most.append(len(entered))
        assert client not in entered
        return pack(client, *args, **kwargs)

    runner.pack = noted
    runner.run()
    assert runner.server.version == 20
    assert max(most) > 2
    assert runner.server.counts["joined"] > 30


def test_early_stopping():
    """In a round of several at one time, and in the last of them; the packages that are left have no effect."""
    for apart, patience in [(False, 1), (False, 2), (True, 3)]:
        together = simulator(apart=apart, latencies=(3,))
        chosen = algorithm(fedbuff(buffer_size=2))
        runner = started(chosen, simulator=together, num_rounds=50, early_stop=patience)
        runner.gv.logger.set_es_key("step_version")  # it grows, which counts as worse
        runner.run()
        assert runner.server.version == patience + 1
        assert not runner.server.tasks
        assert runner.gv.logger.output["step_version"] == [*range(1, patience + 2)]
