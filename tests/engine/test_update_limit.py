"""combine.most: the sweep itself finds values of the updates that are not finite or beyond a limit."""

from itertools import product

import numpy as np
import pytest
from msgspec.structs import replace

from afflux import ops
from test_cut_vectors import ARRIVALS, CACHES, a_round, in_parts, run

POLICIES = ("stages=tiled", "stages=fused")


def under(policy, round):
    ops.choose_policy(policy)
    return run(round)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("step", "held"), [("sgd", 0), ("amsgrad", 0), ("sgd", 1), ("yogi", 3)])
def test_the_limit_of_updates_is_for_all_that_a_sweep_reads(rng, policy_after, step, cache, held):
    """For the direction, a row or a rule vector; the check changes no bit. In the first element or in the last."""
    size = 4096 + 130
    for index, at in zip(range(ARRIVALS), [0, -1, 2048, -1, 5], strict=True):
        flat = a_round(rng, step, cache, held, "float32", "float32", size)
        updates = flat.combine.updates
        updates[index][at] = 2.0**40
        is_read = type(flat.calibrate) is not ops.CachedMean and flat.combine.weights[index] != 0
        is_read |= flat.calibrate is not None and flat.calibrate.new_rows[index] is not None
        is_read |= held in (1, 3)  # the first one takes up every update
        outcomes = []
        for policy, most in product(POLICIES, (np.inf, 2.0**40, 2.0**39)):
            apart = in_parts(flat, np.copy)
            apart = replace(apart, combine=replace(apart.combine, most=most))
            outcomes.append(under(policy, apart))
        assert [sound for _, [sound] in outcomes] == [True, True, not is_read] * 2, index
        assert all(written == outcomes[0][0] for written, _ in outcomes)


def test_limits_between_two_floats(isa, policy_after):
    """The limit is a float64, which is compared exactly; zeros are below any, and infinity and NaN beyond any."""
    value, tiny, largest = np.float32(0.1), np.float32(1e-45), np.finfo(np.float32).max
    cases = [(value, float(value), True), (value, np.nextafter(float(value), 0), False), (value, 0.1, False)]
    cases += [(value, np.nextafter(float(value), 1), True), (tiny, 1e-60, False), (np.float32(-0.0), 1e-60, True)]
    cases += [(-largest, float(largest), True), (-largest, 1e300, True), (np.inf, 1e300, False), (np.nan, 1e300, False)]
    for (element, most, expected), policy in product(cases, POLICIES):
        update = np.zeros(64, np.float32)
        update[40] = element
        combine = ops.Combine([update], np.array([1e-300]), most=most)
        assert under(policy, ops.Pass(np.zeros(64, np.float32), np.empty(64, np.float32), combine))[1] == [expected]
