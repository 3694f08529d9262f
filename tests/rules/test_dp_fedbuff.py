"""dp_fedbuff: what one client can change, the noise beside it, and its epsilon."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

import noise as model
from afflux import NoiseNonce, Server, StoreError, UnavailableError, rules
from afflux.rules.presets.dp_fedbuff import ClippedMean
from afflux.rules.privacy import epsilon, noise_multiplier
from conftest import bits, check_error, push_all

KEY = bytes(range(32))


def serve(updates, **options):
    rule = rules.dp_fedbuff(buffer_size=4, clip=2.0, server_lr=0.5, **options)
    key = KEY if rule.needs.noise else None
    server = Server(rule, np.zeros(updates.shape[1]), dtype="float64", noise_key=key, log=True)
    push_all(server, range(len(updates)), updates.__getitem__)
    return server


def test_a_round_is_the_clipped_mean_and_noise(rng):
    """z C / M = 1.5 * 2 / 4 in each element; M also where a buffer is flushed."""
    updates = rng.standard_normal((7, 300)) * np.array([1, 0.01, 3, 0.1, 1, 0.05, 2])[:, None]
    server = serve(updates, noise_multiplier=1.5)
    server.flush()
    nonces = [bytes.fromhex(entry.nonce) for entry in server.log if isinstance(entry, NoiseNonce)]
    params = np.zeros(300)
    for nonce, part in zip(nonces, (updates[:4], updates[4:]), strict=True):
        v = np.zeros(300)
        for update in part:
            norm = math.sqrt(math.fsum(update * update))
            v = v + min(1.0, 2.0 / norm) / 4 * update
        params = params + 0.5 * (v + 0.75 * model.noise(KEY, nonce, 300))
    assert np.allclose(server.params, params, rtol=1e-13, atol=1e-14)


def test_one_client_changes_the_sum_by_at_most_the_clip(rng):
    updates = rng.standard_normal((4, 100))
    for scale in (1e-3, 1.0, 1e6, 1e140):
        others, all_of_them = updates.copy(), updates.copy()
        all_of_them[2] *= scale
        others[2] = 0.0
        change = serve(all_of_them).params - serve(others).params
        assert np.linalg.norm(change) <= 0.5 * 2.0 / 4 * (1 + 1e-12)


def test_options():
    rule = rules.make("dp_fedbuff", noise_multiplier=2, clip=0.5, buffer_size=20)
    assert rule.weigh == ClippedMean(0.5, 20, 2.0)
    assert (rule.needs.noise, rules.dp_fedbuff().needs.noise, rule.needs.once) == (True, False, True)
    assert rules.from_config(rule.to_config()) == rule
    flower = rules.make("dp_fedbuff", dialect="flower", noise_multiplier=2.0, clipping_norm=0.5, buffer_size=20)
    assert flower == rule
    for options, text in (({"clip": 0}, "clip is 0"), ({"noise_multiplier": -1}, "noise_multiplier is -1")):
        check_error(rf"\[ClippedMean\] {text}", rules.dp_fedbuff, **options)
    check_error("noise_key: dp_fedbuff adds no noise", Server, rules.dp_fedbuff(), np.zeros(3), noise_key=KEY)
    check_error("dp_fedbuff needs each client once", Server, rules.dp_fedbuff(), np.zeros(3), duplicates="both")


def test_a_sum_on_arrival_has_the_same_noise(rng):
    updates, servers = rng.standard_normal((4, 50)), []
    for options in ({}, {"accumulate": True}):
        rule = rules.dp_fedbuff(buffer_size=4, noise_multiplier=1.0)
        servers.append(Server(rule, np.zeros(50), dtype="float64", noise_key=KEY, **options))
        servers[-1]._aggregator.nonce_of = lambda version: bytes(12)
        push_all(servers[-1], range(4), updates.__getitem__)
    assert np.allclose(servers[0].params, servers[1].params, rtol=1e-12, atol=1e-14)
    assert bits(servers[0].params) != bits(np.zeros(50))


def test_a_store_is_not_opened_without_its_noise(tmp_path):
    noisy, quiet, path = rules.dp_fedbuff(noise_multiplier=1.0), rules.dp_fedbuff(), tmp_path / "store"
    Server(noisy, np.zeros(3), noise_key=KEY, store=path).close()
    check_error("whose noise is True, not False", Server.open, path, quiet, error=StoreError)
    Server.open(path, rules.dp_fedbuff(noise_multiplier=2.0), noise_key=KEY).close()


def test_epsilon_is_that_of_the_gaussian_mechanism():
    """Balle and Wang 2018, Theorem 8: K mechanisms of sensitivity 1 are one of sqrt(K)."""
    pytest.importorskip("dp_accounting")
    for z, count, delta in ((1.0, 1, 1e-5), (1.0, 4, 1e-4), (5.0, 24, 1e-5)):
        value, mu = epsilon(rules.dp_fedbuff(noise_multiplier=z, participations=count), delta), math.sqrt(count) / z
        below = [0.5 * math.erfc((value / mu + sign * mu / 2) / math.sqrt(2)) for sign in (-1, 1)]
        assert below[0] - math.exp(value) * below[1] == pytest.approx(delta, rel=1e-4)


def test_the_noise_for_an_epsilon_is_the_least():
    pytest.importorskip("dp_accounting")
    noise = noise_multiplier(8.0, 1e-5, participations=4)
    enough, less = (rules.dp_fedbuff(noise_multiplier=noise - x, participations=4) for x in (0.0, 0.001))
    assert epsilon(enough, 1e-5) <= 8.0 < epsilon(less, 1e-5)
    check_error("participations is 0, must be", noise_multiplier, 8.0, 1e-5, 0)
    for value in (0, 101):
        check_error(f"epsilon is {value}, must be positive and at most 100", noise_multiplier, value, 1e-5, 4)
    check_error("delta is 1, must be less than 1", noise_multiplier, 8.0, 1, 4)


def test_epsilon_of_other_rules():
    rule = rules.dp_fedbuff(noise_multiplier=1.0, participations=4)

    class Louder(ClippedMean):
        """Another part: its weights may be greater."""

    louder = replace(rule, weigh=Louder(1.0, 10, 1.0, 4))
    others = rules.fedbuff(), rules.dp_fedbuff(noise_multiplier=1.0), rules.dp_fedbuff(participations=4), louder, None
    for other in others:
        check_error(r"\[epsilon\] rule must be dp_fedbuff with a noise_multiplier and part", epsilon, other, 1e-5)
    check_error("delta is 1, must be less than 1", epsilon, rule, 1)
    check_error("delta is 0, must be", epsilon, rule, 0)


def test_epsilon_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    rule = rules.dp_fedbuff(noise_multiplier=1.0, participations=4)
    check_error(r"pip install 'afflux\[dp\]'", epsilon, rule, 1e-5, error=UnavailableError)
