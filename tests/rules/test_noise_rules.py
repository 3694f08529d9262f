"""The word `noise`: what a part may say, what a server refuses beside it, and what a round then draws."""

import json
import logging
import os
import secrets
import signal
from functools import partial

import numpy as np
import pytest

import afflux
import noise as model
import oracle
from afflux import Needs, NoiseNonce, Rule, Server, StoreError, Weights, ops, replay
from afflux.aggregation.limits import Limits
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.rules.calibration import CACHED_DIFFERENCE, NONE
from afflux.rules.optimizers import Momentum, Sgd
from afflux.server.assembly import RepeatedKey
from conftest import bits, check_error, needs_fork, push_all
from own_parts import Says

KEY = bytes(range(200, 232))
needing = partial(Says, noise=True)


def own(weigh, size=2, step=None, kind="update"):
    return Rule("mine", kind, size, weigh, NONE, step or Sgd(1.0))


def halves(noise, **more):
    return Weights(np.full(2, 0.5), noise=noise, **more)


def noisy(sigma=0.3, **options):
    return own(needing(halves(sigma), **options))


def kept(next_noise):
    """With a rule vector."""
    weights = halves(0.0, next=np.eye(1, 3), next_noise=next_noise)
    return needing(weights, rule_vectors=("held",))


class Correlated:
    """Buffered linear Toeplitz noise (Dvijotham et al. 2024); the second rule vector forgets none."""

    needs = Needs(noise=True, rule_vectors=("first", "second"))
    weights, decays, coefficients = (-0.4, 0.25), (0.7, 1.0), (1.5, -0.8)

    def __call__(self, arrivals, /):
        count = len(arrivals)
        following = np.hstack([np.diag(self.decays), np.zeros((2, count))])
        return Weights(np.full(count, 0.5), self.weights, following, noise=0.3, next_noise=np.array(self.coefficients))


def serve(rule, size=3, key=KEY, pushes=2, dtype="float64", **options):
    server = Server(rule, np.zeros(size), dtype=dtype, noise_key=key, **options)
    push_all(server, range(pushes), lambda client: np.full(size, client + 1.0))
    return server


def nonces(server):
    return [bytes.fromhex(entry.nonce) for entry in server.log if isinstance(entry, NoiseNonce)]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Says(halves(0.2)), r"\[mine\] weigh gave noise 0.2, but it has no needs = Needs\(noise=True\)"),
        (needing(halves(-0.1)), r"\[mine\] weigh gave noise -0.1, must be at least 0"),
        (Says(halves(0.0, next=np.ones((0, 2)), next_noise=np.zeros(0))), r"next_noise, but it has no needs = Needs\("),
        (needing(halves(0.0, next_noise=np.ones(0))), r"\[mine\] weigh gave next_noise without next"),
        (kept(np.ones(2)), r"\[mine\] weigh gave next_noise of shape \(2,\), expected \(1,\)"),
        (kept([np.nan]), r"\[mine\] weigh gave next_noise \[nan\], must be finite"),
        (kept([-1e40]), r"\[mine\] with next_noise 1e\+40 a rule vector could overflow"),
        (needing(halves(np.nan)), r"\[mine\] weigh gave noise nan, must be finite"),
        (needing(halves(np.inf)), r"\[mine\] weigh gave noise inf, must be finite"),
        (needing(halves("much")), r"\[mine\] weigh gave noise 'much', must be numbers"),
        (needing(halves(1e40)), r"noise 1e\+40 and weights whose magnitudes add up to 1, .* could overflow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_that_are_refused(part, text):
    server = serve(own(part), key=KEY if part.needs.noise else None, pushes=1, dtype="float32")
    check_error(text, server.push, client=1, version=0, update=np.ones(3))
    assert (server.version, server.arrivals_waiting) == (0, 1)


def test_what_does_not_go_with_it(tmp_path):
    check_error("needs noise, which does not go with cached rows", Rule, "mine", "update", 2, needing(halves(1.0)),
                CACHED_DIFFERENCE, Sgd(1.0))  # fmt: skip
    check_error("clip_norms: mine adds noise", Server, noisy(), np.zeros(3), noise_key=KEY, clip_norms=2.0)
    tree = {"w": np.zeros(2), "running_var": np.full(3, 0.1)}
    check_error("params have buffers, which would have none", Server, noisy(), tree, noise_key=KEY)
    for key in (None, KEY[1:], KEY.hex(), bytearray(KEY), 7):
        error = check_error(r"mine adds noise: noise_key must be 32 bytes", Server, noisy(), np.zeros(3), noise_key=key)
        assert key is None or str(key) not in str(error)
    check_error("noise_key: mine adds no noise", Server, own(Says(halves(0.0))), np.zeros(3), noise_key=KEY)
    server = serve(noisy())
    plain = own(Says(halves(0.0)))
    check_error(r"\[replace_rule\] noise is True of the rule in force, False", server.replace_rule, plain)
    check_error("noise_key must be 32 bytes", Server.open_or_create, tmp_path / "a", noisy(), np.zeros(3))


def test_a_round_without_its_key_is_never_made():
    server = serve(noisy(), pushes=1)
    server._aggregator.noise = None
    check_error("the server has no noise_key", server.push, client=1, version=0, update=np.ones(3))
    assert server.version == 0


def test_noise_is_the_last_term_of_the_direction():
    """Of both rounds, each with its own nonce; in float64 and rounded once to float32; of sigma 0 there is none."""
    for dtype in ("float64", "float32"):
        server = serve(noisy(0.3), 5000, pushes=4, dtype=dtype, log=True)
        assert len({*nonces(server)}) == 2
        params = np.zeros(5000, dtype)
        for nonce, mean in zip(nonces(server), (1.5, 3.5), strict=True):
            params = (params + (mean + 0.3 * model.noise(KEY, nonce, 5000))).astype(dtype)
        assert bits(server.params) == bits(params)
    plain, zero = serve(own(Says(halves(0.0))), key=None), serve(noisy(0.0), log=True)
    assert (bits(plain.params), nonces(zero)) == (bits(zero.params), [])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_noise_that_is_correlated_over_rounds(dtype, rng):
    """Random clients, numbers of arrivals and updates. Of a round's normals, each later direction has a share."""
    size, theta = 1200, Correlated.decays
    server = Server(own(Correlated(), 4), np.zeros(size), dtype=dtype, noise_key=KEY, log=True)
    params, held, directions = np.zeros(size, dtype), [np.zeros(size, dtype)] * 2, []
    for _ in range(9):
        clients = sorted(rng.choice(50, int(rng.integers(1, 5)), replace=False).tolist())
        updates = [rng.standard_normal(size).astype(dtype) for _ in clients]
        for client, update in zip(clients, updates, strict=True):
            server.push(client=client, version=server.version, update=update)
        if len(clients) < 4:
            server.flush()
        z = model.noise(KEY, nonces(server)[-1], size)
        v, _ = oracle.direction(params, updates, [0.5] * len(clients), 0.0, (held, Correlated.weights))
        directions.append(v + 0.3 * z - 0.5 * np.sum(updates, axis=0, dtype=float))
        params = oracle.step("sgd", params, v + 0.3 * z, [], 1.0)[0]
        terms = zip(held, theta, Correlated.coefficients, strict=True)
        held = [(decay * oracle.f64(b) + c * z).astype(dtype) for b, decay, c in terms]
        assert bits(server.params) == bits(params)
        assert [*map(bits, server.rule_vectors.values())] == [*map(bits, held)]
    drawn = [model.noise(KEY, nonce, size) for nonce in nonces(server)]
    shares = model.toeplitz(0.3, Correlated.weights, theta, Correlated.coefficients, 9)
    expected = [sum(share * z for share, z in zip(row, drawn, strict=False)) for row in shares]
    assert np.allclose(directions, expected, atol=1e-13 if dtype == "float64" else 1e-5)


def test_next_noise_of_zeros_is_none():
    """With noise in the direction, and without."""
    for sigma in (0.0, 0.3):
        states = []
        for next_noise in (None, np.zeros(1), np.array([-0.0])):
            weights = halves(sigma, rule_vectors=(0.5,), next=np.array([[0.9, 1.0, -1.0]]), next_noise=next_noise)
            server = serve(own(needing(weights, rule_vectors=("held",))), 700, RepeatedKey(KEY), 6, log=True)
            states.append((bits(server.params), bits(server.rule_vectors["held"]), *nonces(server)))
        assert len({*states}) == 1
        assert len(states[0]) == 2 + 3 * (sigma > 0)


def test_rule_vectors_alone_may_have_noise():
    server = serve(own(kept([-0.6])), 700, log=True)
    assert bits(server.params) == bits(np.full(700, 1.5))
    assert bits(server.rule_vectors["held"]) == bits(-0.6 * model.noise(KEY, *nonces(server), 700))
    server._aggregator.noise = None
    push_all(server, range(1), lambda client: np.ones(700))
    check_error("the server has no noise_key", server.push, client=1, version=1, update=np.ones(700))


def test_a_step_that_fails_changes_no_rule_vector():
    """The sweep has read the fault; also a vector whose row of `next` is 1 at itself was not written in place."""
    server = Server(own(Correlated()), np.zeros(700), noise_key=KEY)
    server.step([(client, 0, np.ones(700)) for client in range(2)])
    before = [*map(bits, server.rule_vectors.values())]
    update = np.ones(700)
    update[3] = np.nan
    check_error("non-finite value at index 3", server.step, [(0, 1, np.ones(700)), (1, 1, update)])
    assert [*map(bits, server.rule_vectors.values())] == before
    assert server.version == 1


def test_clipped_and_rejected_weights_keep_their_noise():
    """A weight that is rejected, a flush, a skipped round."""

    class One:
        needs = afflux.Needs(noise=True)

        def __call__(self, arrivals, /):
            return Weights(np.where(arrivals.num_examples == 7, 1e300, 0.5), noise=0.2)

    server = Server(own(One()), np.zeros(3), noise_key=KEY, log=True, dtype="float64")
    server.push(client=0, version=0, update=np.ones(3))
    report = server.push(client=1, version=0, update=np.ones(3), num_examples=7).report
    assert report.weights.tolist() == [0.5, 0.0]
    server.push(client=0, version=0, update=np.ones(3))
    server.flush()
    params = np.zeros(3)
    for nonce in nonces(server):
        params = params + (0.5 + 0.2 * model.noise(KEY, nonce, 3))
    assert bits(server.params) == bits(params)
    skipped = serve(own(needing(halves(0.3, skip=True))))
    assert (skipped.version, skipped.params.tolist()) == (0, [0.0] * 3)


@pytest.mark.parametrize("place", ["shards", "store", "step", "state"])
def test_a_log_gives_the_rounds_again(place, tmp_path, rng):
    """With the key: in shards, from a store, of pushes that a step reads where they are, and from a state."""
    size, updates = 140_001, rng.standard_normal((8, 140_001))
    made = {"plane": ShardedPlane(3)} if place == "shards" else {}
    made |= {"store": tmp_path / "store"} if place == "store" else {}
    rule = own(Correlated(), step=Momentum(0.5, 0.9))
    first = Server(rule, np.zeros(size), noise_key=KEY, log=True, **made)
    for number in range(0, 8, 2):
        if place == "step":
            first.step([(client, first.version, updates[number + client]) for client in range(2)])
        else:
            push_all(first, range(2), lambda client, number=number: updates[number + client])
        if number == 4 and place == "state":
            state = json.loads(json.dumps(first.state_dict()["meta"])), first.state_dict()["arrays"]
            first = Server(rule, np.zeros(size), noise_key=KEY, log=True)
            first.load_state_dict({"meta": state[0], "arrays": state[1]})
        if number == 4 and place == "store":
            first.close()
            first = Server.open(tmp_path / "store", rule, noise_key=KEY)
    assert len({*nonces(first)}) == first.version == 4
    again = replay(first.log, Server(rule, np.zeros(size), noise_key=KEY, log=True), lambda join: updates[join.number])
    assert (bits(again.params), nonces(again)) == (bits(first.params), nonces(first))
    assert [*map(bits, again.rule_vectors.values())] == [*map(bits, first.rule_vectors.values())]
    other = replay(first.log, Server(rule, np.zeros(size), noise_key=bytes(32)), lambda join: updates[join.number])
    assert bits(other.params) != bits(first.params)
    drawn = [entry for entry in first.log if isinstance(entry, NoiseNonce)]
    for version, kept in ((1, []), (2, drawn[:1])):
        without = [entry for entry in first.log if not isinstance(entry, NoiseNonce) or entry in kept]
        check_error(f"the log has no nonce for the noise of version {version}", replay, without,
                    Server(rule, np.zeros(size), noise_key=KEY), lambda join: updates[join.number])  # fmt: skip
    if place == "store":
        first.close()
        part = Says(halves(0.0), rule_vectors=("first", "second"))  # which no configuration names
        quiet = own(part, step=Momentum(0.5, 0.9))
        check_error("whose noise is True, not False", Server.open, tmp_path / "store", quiet, error=StoreError)


@needs_fork
@pytest.mark.parametrize("kills", [3, pytest.param(1000, marks=pytest.mark.soak)])
def test_no_nonce_comes_twice(tmp_path, kills):
    """The same arrivals once more: after an earlier state was loaded; in a forked child; of two servers with one key;
    and after kills, by which rounds are lost.
    """
    seen, rule = [], noisy()
    server = serve(rule, log=True)
    state = server.state_dict()
    for _ in range(3):
        server.load_state_dict(state)
        push_all(server, range(2), lambda client: np.ones(3))
        seen += nonces(server)[-1:]
    read, write = os.pipe()

    def in_child(body):
        if (pid := os.fork()) == 0:
            try:
                os.write(write, body()[-1])
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        seen.append(os.read(read, 12))

    def pushed(server):
        push_all(server, range(2), lambda client: np.ones(3))
        return nonces(server)

    in_child(lambda: pushed(server))
    seen += pushed(server)[-1:]
    for _ in range(2):
        seen += nonces(serve(rule, log=True))
    with serve(rule, pushes=0, log=True, store=tmp_path / "store", commit_every=None):
        pass
    for _ in range(kills):
        in_child(lambda: pushed(Server.open(tmp_path / "store", rule, noise_key=KEY)))
    assert len({*seen}) == len(seen) == 7 + kills
    with Server.open(tmp_path / "store", rule, noise_key=KEY) as opened:
        assert opened.version == 0


def test_the_key_is_in_nothing_that_a_server_gives(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    rule, shown = noisy(), []
    server = serve(rule, log=True, store=tmp_path / "store", on_step=lambda report: shown.append(repr(report)))
    shown += [repr(server), repr(vars(server)), repr(vars(server._aggregator)), repr(server.log), caplog.text]
    shown += [repr(server.state_dict()["meta"]), repr(server.rule.weigh), repr(server.options)]
    server.close()
    stored = b"".join(file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file())
    for secret in (KEY, KEY.hex().encode(), repr(KEY)[2:-1].encode()):
        assert secret not in stored
        assert not any(secret in text.encode() for text in shown)


def test_limits_count_nine_sigma():
    limits = Limits(1e15, np.inf, float(np.finfo("float32").max))
    most = float(np.finfo("float32").max) / 1e6 / 9
    check = partial(limits.check_step, noisy(), ops.Step("sgd"), 1.0, [0.0, 0.0], (), 0.999999 * most)
    assert check() is None
    check_error("could overflow", limits.check_step, noisy(), ops.Step("sgd"), 1.0, [0.0, 0.0], (), 1.000001 * most)


def test_a_key_of_secrets_is_one():
    assert serve(noisy(), key=secrets.token_bytes(32)).version == 1
