"""WKAFL in edge cases: cosines are within [-1, 1], the ablations are those of the paper, and no vector is read
without need.
"""

import numpy as np
import pytest

from afflux import Server, ops
from afflux.rules import wkafl
from conftest import bits, push_all


def reports(rule, gradients):
    """Each round's report; the client pulls version 0 always."""
    server = Server(rule, np.zeros(gradients.shape[-1]))
    return [
        receipt.report
        for client, gradient in enumerate(gradients)
        if (receipt := server.push(client=client, version=0, gradient=gradient, loss=0.0)).report
    ]


@pytest.mark.parametrize("d", [1, 2])
def test_cosines_are_clamped(d, rng):
    """In one dimension each is 1 or -1; rounding made some less than -1, which sim_min = -1 rejected."""
    made = reports(wkafl(buffer_size=3, sim_min=-1.0), rng.standard_normal((900, d)).astype(np.float32))
    assert len(made) == 300
    assert not any(any(report.rejected) for report in made)
    cosines = np.concatenate([report.cosines for report in made])
    assert np.abs(cosines).max() <= 1.0


def test_without_staleness_the_rate_is_constant(rng):
    """Section 4.3.4 counts the adapted rate among the staleness measures."""
    gradients = rng.standard_normal((8, 5)).astype(np.float32)
    for staleness, rates in ((True, [0.5, 0.4, 0.5 / 1.5, 0.5 / 1.75]), (False, [0.5] * 4)):
        made = reports(wkafl(buffer_size=2, server_lr=0.5, gamma=0.25, staleness=staleness), gradients)
        assert [report.server_lr for report in made] == rates


@pytest.fixture
def sweeps(monkeypatch):
    """The weights of every call of ops.inner."""
    asked, inner = [], ops.inner
    monkeypatch.setattr(ops, "inner", lambda v, weights, **k: asked.append(weights) or inner(v, weights, **k))
    return asked


@pytest.mark.parametrize(("clip", "calls"), [(3.0, 20), (15.0, 13), (100.0, 10), (None, 10)])
def test_the_sweep_is_made_again_only_where_a_norm_is_clipped(clip, calls, sweeps):
    rng = np.random.default_rng(7)
    gradients = (rng.standard_normal((40, 50)) * rng.choice([0.5, 1.0, 2.0], (40, 1))).astype(np.float32)
    reports(wkafl(buffer_size=4, clip=clip), gradients)
    assert len(sweeps) == calls
    assert all(weights is not None for weights in sweeps)


@pytest.mark.parametrize(("options", "calls"), [({}, 2), ({"clip": None}, 0), ({"clip": np.inf}, 0)])
def test_without_selection_norms_are_all_that_is_read(options, calls, rng, sweeps):
    made = reports(wkafl(buffer_size=3, selection=False, **options), rng.standard_normal((6, 50)).astype(np.float32))
    assert sweeps == [None] * calls
    assert [report.cosines for report in made] == [None, None]


def test_a_memory_that_has_no_part_is_not_read(rng):
    """Alpha = 0: the last estimate enters neither products nor direction. Its elements are huge here."""
    servers = [Server(wkafl(buffer_size=3, momentum=False), np.zeros(50)) for _ in range(2)]
    state = servers[1].state_dict()
    state["arrays"]["rule_vector.estimate"][:] = 1e30
    servers[1].load_state_dict(state)
    for client, gradient in enumerate(rng.standard_normal((6, 50)).astype(np.float32)):
        ours, theirs = (s.push(client=client, version=0, gradient=gradient, loss=0.0).report for s in servers)
        assert ours is None or bits(ours.cosines) == bits(theirs.cosines)
    assert bits(servers[0].params) == bits(servers[1].params)


def test_cosines_survive_gradients_that_cancel_the_last_estimate(rng):
    """What is left of them is 1e-7 of their length: sums of inner products of that length lost the second digit."""
    d, alpha = 5000, 0.5
    server = Server(wkafl(buffer_size=3, alpha=alpha, sim_min=-1.0, staleness=False), np.zeros(d), dtype="float64")
    push_all(server, range(3), lambda _: rng.standard_normal(d), version=0)
    estimate = server.rule_vectors["estimate"].astype(np.longdouble)
    gradients = -alpha * np.asarray(estimate, float) + 1e-7 * rng.standard_normal((3, d))
    for client, gradient in enumerate(gradients):
        report = server.push(client=client, version=1, gradient=gradient).report
    left = gradients.astype(np.longdouble) + np.longdouble(alpha) * estimate
    mean = left.mean(axis=0)
    exact = [float(x @ mean / np.sqrt((x @ x) * (mean @ mean))) for x in left]
    assert np.all(np.abs(report.cosines - exact) < 2e-9)  # 3 eps of |g| + |t| for each element, 1e7 times what is left
