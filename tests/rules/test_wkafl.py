"""WKAFL at the edges: cosines stay within [-1, 1], and the ablations leave out what the paper says."""

import numpy as np
import pytest

from afflux import AffluxError, Server
from afflux.rules import wkafl


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
