"""What the rounds of presets/ share, and what they take and give, without a look at the engine.

    ROUNDS[name](state, buffer, **options) -> (state after the round, decisions)

state      {"params", "version", the rule's vectors and scalars by name; rules that cache: "rows" {client: row} and
           "num_clients"; gsgm: "num_clients" and "entered", the clients that this pass has had before the round}
buffer     [(client, staleness, examples, loss, vector), ...], in canonical order
decisions  direction, terms   v, and the sum of the magnitudes that add up to it, (d,)
           weights            (M,), of the pushed vectors in v
           accepted           (M,) bool
           server_lr          the learning rate of this round, bias correction included
           stepped            was a step made?
           fired              {what: did it?}  what a rule decides besides, a bool or (M,) bools
           margins            {what: relative distance of the quantity from its threshold}, of "accepted" as of `fired`
"""

import math

import numpy as np

EXP_HALF = math.e / 2  # the base of WKAFL's and TWAFL's staleness weights


def f64(array):
    return np.asarray(array, dtype=np.float64)


def norm(vector):
    return float(np.sqrt(np.sum(vector * vector)))


def inner(x, y):
    return float(np.sum(x * y))


def cosine(x, y):
    """0 for a zero vector."""
    lengths = norm(x) * norm(y)
    return inner(x, y) / lengths if lengths > 0 else 0.0


def shrink(norms, bound):
    """What clips each of these norms to a bound."""
    return f64([bound / n if n > bound else 1.0 for n in norms])


def constant(staleness):
    return np.ones_like(f64(staleness))


def polynomial(staleness, a):
    return (1.0 + f64(staleness)) ** -a


def hinge(staleness, a, b):
    t = f64(staleness)
    return np.where(t <= b, 1.0, 1.0 / (a * (t - b) + 1.0))


def exponential(staleness, base=EXP_HALF):
    return base ** -f64(staleness)


LAWS = {"constant": constant, "polynomial": polynomial, "hinge": hinge, "exponential": exponential}


def facts(buffer):
    """staleness, examples, losses, each (M,); and the vectors."""
    _, staleness, examples, losses, vectors = zip(*buffer, strict=True)
    return f64(staleness), f64(examples), f64(losses), [f64(v) for v in vectors]


def total(weights, vectors):
    """sum_i w_i v_i, and the sum of the terms' magnitudes. What has weight 0 is not read."""
    terms = [w * v for w, v in zip(weights, vectors, strict=True) if w != 0]
    zero = np.zeros_like(vectors[0])
    return sum(terms, zero), sum((np.abs(t) for t in terms), zero)


def decided(weights, direction, terms, lr, accepted=None, **more):
    accepted = np.ones(len(weights), bool) if accepted is None else accepted
    plain = {"direction": direction, "terms": terms, "weights": f64(weights), "accepted": accepted, "server_lr": lr}
    return plain | {"stepped": True, "fired": {}, "margins": {}} | more


def moved(state, params, **vectors):
    return state | vectors | {"params": params, "version": state["version"] + 1}


def added(state, weights, vectors, lr):
    """x + lr sum_i w_i u_i; for gradients lr is negative here."""
    v, terms = total(weights, vectors)
    return moved(state, state["params"] + lr * v), decided(weights, v, terms, abs(lr))
