"""WKAFL at the edges: cosines stay within [-1, 1], the ablations leave out what the paper says, and a sweep is left out
only where it changes nothing.
"""

import sys

import numpy as np
import pytest

from afflux import AffluxError, Server, ops
from afflux.rules import wkafl
from conftest import bits


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


def test_gamma_is_checked_where_it_is_left_out():
    with pytest.raises(AffluxError, match=r"\[wkafl\] gamma is None"):
        wkafl(gamma=None, staleness=False)


@pytest.fixture
def sweeps(monkeypatch):
    """The weights of every call of ops.inner."""
    asked, inner = [], ops.inner
    monkeypatch.setattr(
        ops, "inner", lambda vectors, weights, **k: asked.append(weights) or inner(vectors, weights, **k)
    )
    return asked


def course(rule, gradients, versions):
    """What a server has after pushes of these gradients, as bits, and the largest excess of the estimate's norm."""
    server, excess = Server(rule, np.zeros(gradients.shape[-1], np.float32), max_versions=100), 0.0
    for client, (gradient, late) in enumerate(zip(gradients, versions, strict=True)):
        server.push(client=client, version=max(server.version - late, 0), gradient=gradient, loss=1.0)
        known, now = server.scalars["estimate_norm"], np.linalg.norm(server.rule_vectors["estimate"].astype(float))
        excess = max(excess, now - known * (1 + 1e-6))
    return [bits(server.params), bits(server.rule_vectors["estimate"])], excess


@pytest.mark.parametrize("options", [{}, {"memory": "aggregate"}, {"selection": False}, {"alpha": -0.9}], ids=str)
@pytest.mark.parametrize("clip", [3.0, 15.0, 100.0, None])
def test_the_sweep_for_norms_is_left_out_where_no_clip_is_active(options, clip, rng, sweeps, monkeypatch):
    gradients = (rng.standard_normal((40, 50)) * rng.choice([0.5, 1.0, 2.0], (40, 1))).astype(np.float32)
    versions, rule = rng.integers(0, 3, 40), wkafl(buffer_size=4, clip=clip, stage_two_version=5, **options)
    found, excess = course(rule, gradients, versions)
    assert excess <= 0  # the norm that is kept is the estimate's, or more
    asked = [weights is None for weights in sweeps]
    if clip == 3.0:
        assert any(asked)
    if clip in (100.0, None):
        assert not any(asked)
    assert asked.count(False) == (0 if "selection" in options else 10)
    monkeypatch.setattr(sys.modules[wkafl.__module__], "_SURELY", 0.0)  # nothing is known of any norm
    again, _ = course(rule, gradients, versions)
    assert again == found


def test_a_memory_that_has_no_part_is_not_read(rng, monkeypatch):
    """Alpha = 0: the last estimate enters neither products nor direction."""
    gradients = rng.standard_normal((6, 50)).astype(np.float32)
    shifts, inner = [], ops.inner
    monkeypatch.setattr(ops, "inner", lambda *a, **k: shifts.append(k["shift"]) or inner(*a, **k))
    made = reports(wkafl(buffer_size=3, momentum=False, sim_min=-1.0), gradients)
    assert shifts == [0.0, 0.0]
    for report, block in zip(made, gradients.reshape(2, 3, 50).astype(float), strict=True):
        estimate = np.full(3, 1 / 3) @ block if report.version == 1 else None
        if estimate is not None:
            cosines = block @ estimate / np.linalg.norm(block, axis=1) / np.linalg.norm(estimate)
            assert np.all(np.abs(report.cosines - cosines) < 1e-13)


def test_cosines_survive_gradients_that_cancel_the_last_estimate(rng):
    """What is left of them is 1e-7 of their length: sums of inner products of that length lost the second digit."""
    d, alpha = 5000, 0.5
    server = Server(
        wkafl(buffer_size=3, alpha=alpha, sim_min=-1.0, staleness=False), np.zeros(d, np.float64), dtype="float64"
    )
    for client in range(3):
        server.push(client=client, version=0, gradient=rng.standard_normal(d))
    estimate = server.rule_vectors["estimate"].astype(np.longdouble)
    gradients = -alpha * np.asarray(estimate, float) + 1e-7 * rng.standard_normal((3, d))
    for client, gradient in enumerate(gradients):
        report = server.push(client=client, version=1, gradient=gradient).report
    left = gradients.astype(np.longdouble) + np.longdouble(alpha) * estimate
    mean = left.mean(axis=0)
    exact = [float(x @ mean / np.sqrt((x @ x) * (mean @ mean))) for x in left]
    assert np.all(np.abs(report.cosines - exact) < 2e-9)  # 3 eps of |g| + |t| for each element, 1e7 times what is left
