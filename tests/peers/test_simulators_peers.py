"""The simulators of the benchmark make as many client updates as afflux's, and the same one from the same params."""

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("torch")

from bench.rows.simulators import workload
from bench.rows.simulators.flgo import FLGO_MODULES, flgo
from bench.rows.simulators.ours import ours
from bench.rows.simulators.pfl import PFL_MODULES, pfl
from bench.rows.simulators.workload import STEPS, Workload, one_update
from bench.spec.libraries import absent
from counted import Counted, a_counted, logistic_bound, moved

pytestmark = pytest.mark.filterwarnings("default")  # their own
PEERS = {
    "flgo, torch_loader": (FLGO_MODULES, flgo("torch_loader")),
    "flgo, BatchesByIndex": (FLGO_MODULES, flgo("BatchesByIndex")),
    "pfl": (PFL_MODULES, pfl),
}


@pytest.fixture(params=PEERS)
def peer(request):
    modules, simulator = PEERS[request.param]
    if why := absent(*modules):
        pytest.skip(f"{why} (make frameworks installs it)")
    return simulator


def test_as_many_steps(peer):
    new_run = peer(Workload(a_counted, 30))
    for _ in range(2):  # a run has no effect on the next one
        run = new_run()
        Counted.calls = 0
        params = run()
        assert Counted.calls == 30 * STEPS
        assert moved(params, a_counted) > 0.01


def test_the_same_update(peer):
    theirs, mine = peer(one_update(workload.logistic))()(), ours(one_update(workload.logistic))()()
    assert np.abs(theirs - mine).max() < 2 * logistic_bound()  # both have been rounded
    assert moved(mine, workload.logistic) > 200 * logistic_bound()


def test_the_same_update_of_the_cnn(peer):
    """Where a ReLU's input is a rounding away from 0, orders of summation may differ in its slope: so not to an ulp."""
    theirs, mine = peer(one_update(workload.cnn))()(), ours(one_update(workload.cnn))()()
    assert np.abs(theirs - mine).max() < 0.01 * moved(mine, workload.cnn)
