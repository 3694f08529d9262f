"""Servers with a second moment, of FedOpt, FedAMS and FADAS: the step, and how far the engine's may be from it.

The moments, with d(D^2) = 2 |D| dv + dv^2; sqrt(V) by |sqrt a - sqrt b| <= min(|a - b| / sqrt a, sqrt |a - b|); a
quotient by |m'/q' - m/q| <= (dm + |m/q| dq) / (q - dq). Yogi's sign may differ where |v - D^2| is below its error.
"""

import math

import numpy as np

from oracle import EPS
from papers import decided, facts, moved, total

ADAM, AMSGRAD = ("m", "v"), ("m", "v", "v_hat")  #: the vectors that they keep


def adam_v(state, delta, beta2):
    return {"v": beta2 * state["v"] + (1 - beta2) * delta**2}


def amsgrad_v(state, delta, beta2):
    """FADAS, equation 3: the maximum of the raw v."""
    v = beta2 * state["v"] + (1 - beta2) * delta**2
    return {"v": v, "v_hat": np.maximum(state["v_hat"], v)}


def adagrad_v(state, delta, _beta2):
    return {"v": state["v"] + delta**2}


def yogi_v(state, delta, beta2):
    return {"v": state["v"] - (1 - beta2) * delta**2 * np.sign(state["v"] - delta**2)}


SECOND = {"adam": adam_v, "amsgrad": amsgrad_v, "adagrad": adagrad_v, "yogi": yogi_v}


def adapted(state, delta, second, lr, beta1, beta2, epsilon, root_scale=1.0):
    """x + lr m / (root_scale sqrt(V) + epsilon), and the new m, v (and v_hat)."""
    m = beta1 * state["m"] + (1 - beta1) * delta
    moments = SECOND[second](state, delta, beta2)
    root = np.sqrt(moments.get("v_hat", moments["v"]))
    return moved(state, state["params"] + lr * m / (root_scale * root + epsilon), m=m, **moments)


def adaptive(second, **defaults):
    """A round of FedOpt's servers or FedAMS, and its bounds: Delta is the plain mean of the updates."""
    numbers = {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3} | defaults

    def one_round(state, buffer, **options):
        o = numbers | options
        *_, updates = facts(buffer)
        weights = np.full(len(buffer), 1 / len(buffer))
        delta, terms = total(weights, updates)
        after = adapted(state, delta, second, o["server_lr"], o["beta1"], o["beta2"], o["epsilon"])
        return after, decided(weights, delta, terms, o["server_lr"])

    def bounds(before, buffer, after, decisions, dv, options):
        return adaptive_bounds(second, before, after, decisions, dv, numbers | options)

    return one_round, bounds


def adaptive_bounds(kind, before, after, decisions, dv, options):
    """{vector: bound}, before it is rounded, from the numbers of the round and the error `dv` of its direction."""
    beta1, beta2, epsilon = (options[key] for key in ("beta1", "beta2", "epsilon"))
    delta, t = decisions["direction"], before["version"] + 1
    corrected = options.get("bias_correction", False)
    root_scale = 1 / math.sqrt(1 - beta2**t) if corrected else 1.0
    first, second = ((2 * t + 20) * EPS / (1 - beta**t if corrected else 1) for beta in (beta1, beta2))

    dm = (1 - beta1) * dv + 8 * EPS * (np.abs(beta1 * before["m"]) + np.abs((1 - beta1) * delta))
    d_square = 2 * np.abs(delta) * dv + dv**2 + 4 * EPS * delta**2
    share = 1.0 if kind == "adagrad" else 1 - beta2
    d_v = share * d_square + 8 * EPS * (np.abs(before["v"]) + share * delta**2)
    if kind == "yogi":
        unsure = np.abs(before["v"] - delta**2) <= d_square
        d_v = d_v + np.where(unsure, 2 * share * (delta**2 + d_square), 0)

    root = np.sqrt(after.get("v_hat", after["v"]))
    d_root = np.minimum(d_v / np.maximum(root, 1e-300), np.sqrt(d_v))
    q = root_scale * root + epsilon
    dq = root_scale * d_root + (second + 8 * EPS) * q
    assert np.all(dq < q / 2)
    lr, quotient = decisions["server_lr"], np.abs(after["m"] / q)
    params = lr * (dm + quotient * dq) / (q - dq) + (first + 8 * EPS) * lr * quotient
    params = params + 8 * EPS * np.abs(before["params"])
    return {"params": params, "m": dm, "v": d_v} | ({"v_hat": d_v} if "v_hat" in after else {})
