"""One server round of every rule, from the papers, in plain float64 NumPy, without a look at the engine.

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

import rows

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
#: The vectors that a rule keeps, all (d,), zeros at first (m, v, v_hat: see `start`).
VECTORS = {
    "fedadam": ("m", "v"),
    "fedyogi": ("m", "v"),
    "fedadagrad": ("m", "v"),
    "fedams": ("m", "v", "v_hat"),
    "fadas": ("m", "v", "v_hat"),
    "wkafl": ("estimate",),
    "gsgm": ("momentum", "pass_sum"),
    "zenopp": ("validation",),
}
SCALARS = {"wkafl": {"stage": 1.0}, "gsgm": {"rounds_in_pass": 0.0}}


def start(name, params, num_clients=None, initial_v=0.0):
    """The state before the first round."""
    params = f64(params)
    state = {"params": params, "version": 0, "num_clients": num_clients, "rows": {}, "entered": 0}
    for vector in VECTORS.get(name, ()):
        state[vector] = np.full_like(params, initial_v if vector in ("v", "v_hat") else 0.0)
    return state | SCALARS.get(name, {})


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


# ---- sums of the buffer --------------------------------------------------------------------------------------------


def fedavg(state, buffer, *, server_lr=1.0):
    _, examples, _, updates = facts(buffer)
    return added(state, examples / examples.sum(), updates, server_lr)


def fedbuff(state, buffer, *, server_lr=1.0, staleness=("polynomial", 0.5), normalise="count"):
    """x + (eta / M) sum_i s(tau_i) u_i; or divided by sum_i s(tau_i)."""
    tau, _, _, updates = facts(buffer)
    s = LAWS[staleness[0]](tau, *staleness[1:])
    return added(state, s / (len(buffer) if normalise == "count" else s.sum()), updates, server_lr)


def fedasync(state, buffer, *, alpha=0.6, staleness=("polynomial", 0.5)):
    """(1 - alpha_t) x + alpha_t y, alpha_t = alpha s(tau)."""
    tau, _, _, (model,) = facts(buffer)
    (mix,) = alpha * LAWS[staleness[0]](tau, *staleness[1:])
    x = state["params"]
    decisions = decided([mix], mix * (model - x), mix * (np.abs(model) + np.abs(x)), 1.0)
    return moved(state, (1 - mix) * x + mix * model), decisions


def afa_cd(state, buffer, *, server_lr=0.1):
    """AFL, Algorithm 2."""
    *_, gradients = facts(buffer)
    return added(state, np.full(len(buffer), 1 / len(buffer)), gradients, -server_lr)


def twafl(state, buffer, *, server_lr=0.005, normalise=None):
    """x - eta sum_i (n_i / n) (e/2)^-tau_i g_i, n = sum_i n_i."""
    tau, examples, _, gradients = facts(buffer)
    w = examples / examples.sum() * exponential(tau)
    return added(state, w / w.sum() if normalise == "weights" else w, gradients, -server_lr)


def sasgd(state, buffer, *, server_lr=0.005):
    """x - (1/M) sum_i (eta / tau_i) g_i, where a fresh gradient counts as one of staleness 1."""
    tau, _, _, gradients = facts(buffer)
    return added(state, 1 / (len(buffer) * np.maximum(tau, 1)), gradients, -server_lr)


# ---- cached rows ---------------------------------------------------------------------------------------------------


def ca2fl(state, buffer, *, server_lr=1.0):
    """CA2FL, Algorithm 1: v = h + (1/|S|) sum_i (u_i - h_i) with the old h = (1/N) sum_i h_i; then h_i = u_i."""
    *_, updates = facts(buffer)
    weights = np.full(len(buffer), 1 / len(buffer))
    v, terms = cached_difference(state, buffer, weights)
    rows = state["rows"] | {client: u for (client, *_), u in zip(buffer, updates, strict=True)}
    return moved(state, state["params"] + server_lr * v, rows=rows), decided(weights, v, terms, server_lr)


def mf_ca2fl(state, buffer, *, server_lr=1.0, bits=8, codec="affine", quantize_direction=False):
    """CA2FL, section 5: h_i = Q(u_i), drawn with seed 0, the round's version and the client; (G.2): v uses Q(u_i)."""
    *_, updates = facts(buffer)
    weights, version = np.full(len(buffer), 1 / len(buffer)), state["version"] + 1
    stored = {}
    for (client, *_), u in zip(buffer, updates, strict=True):
        name, size = f"{codec}-{bits}", len(u)
        row = rows.encode(name, u, rows.row_key(0, version, client), u.min(), u.max())
        stored[client] = f64(rows.decode(name, row, size))
    if quantize_direction:
        buffer = [(client, *what, stored[client]) for client, *what, _ in buffer]
    v, terms = cached_difference(state, buffer, weights)
    new = state["rows"] | stored
    return moved(state, state["params"] + server_lr * v, rows=new), decided(weights, v, terms, server_lr)


def cached_difference(state, buffer, weights):
    """h + sum_i w_i (u_i - h_i)."""
    *_, updates = facts(buffer)
    zero = np.zeros_like(state["params"])
    old = [state["rows"].get(client, zero) for client, *_ in buffer]
    n = state["num_clients"]
    h, h_terms = sum(state["rows"].values(), zero) / n, sum(map(np.abs, state["rows"].values()), zero) / n
    plus, plus_terms = total(weights, updates)
    minus, minus_terms = total(weights, old)
    return h + plus - minus, h_terms + plus_terms + minus_terms


def afa_cs(state, buffer, *, server_lr=0.1, divide_by="all"):
    """AFL, Algorithm 3: the memory takes the new gradients, then x - eta times the mean of the memory."""
    *_, gradients = facts(buffer)
    rows = state["rows"] | {client: g for (client, *_), g in zip(buffer, gradients, strict=True)}
    n = state["num_clients"] if divide_by == "all" else len(rows)
    zero = np.zeros_like(state["params"])
    v, terms = sum(rows.values(), zero) / n, sum(map(np.abs, rows.values()), zero) / n
    return moved(state, state["params"] - server_lr * v, rows=rows), decided([1 / n] * len(buffer), v, terms, server_lr)


# ---- adaptive servers ----------------------------------------------------------------------------------------------


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
    """FedOpt's servers, and FedAMS: Delta is the plain mean of the updates."""

    def one_round(state, buffer, **options):
        o = {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3} | defaults | options
        *_, updates = facts(buffer)
        weights = np.full(len(buffer), 1 / len(buffer))
        delta, terms = total(weights, updates)
        after = adapted(state, delta, second, o["server_lr"], o["beta1"], o["beta2"], o["epsilon"])
        return after, decided(weights, delta, terms, o["server_lr"])

    return one_round


def fadas(
    state, buffer, *, server_lr=0.001, beta1=0.9, beta2=0.99, epsilon=1e-8, bias_correction=False, delay_adaptive=None,
    threshold=1,
):  # fmt: skip
    """FADAS, Algorithm 1; delay_adaptive "inverse" is its equation 77, "minimum" its equation 4."""
    tau, _, _, updates = facts(buffer)
    weights = np.full(len(buffer), 1 / len(buffer))
    delta, terms = total(weights, updates)
    slow = bool(delay_adaptive) and tau.max() > threshold
    lr = server_lr
    if slow:
        lr = server_lr / tau.max() if delay_adaptive == "inverse" else min(server_lr, 1 / tau.max())
    corrected, root_scale = lr, 1.0
    if bias_correction:
        t = state["version"] + 1
        corrected, root_scale = lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)
    after = adapted(state, delta, "amsgrad", corrected, beta1, beta2, epsilon, root_scale)
    margin = abs(tau.max() - threshold)
    return after, decided(weights, delta, terms, corrected, fired={"delay": slow}, margins={"delay": margin})


# ---- directions ----------------------------------------------------------------------------------------------------


def wkafl(
    state, buffer, *, server_lr=0.005, alpha=0.1, sim_min=0.3, beta=10.0, gamma=0.1, clip=100.0, stage_two_clip=10.0,
    stage_two_loss=None, stage_two_version=None, selection=True, staleness=True, momentum=True, memory="estimate",
):  # fmt: skip
    """WKAFL, Algorithms 2 and 3, with vectors throughout."""
    tau, _, losses, gradients = facts(buffer)
    # 1. The stage.
    late = stage_two_version is not None and state["version"] >= stage_two_version
    low = stage_two_loss is not None and bool(losses.mean() <= stage_two_loss)
    stage = 2.0 if state["stage"] == 2 or late or low else 1.0
    # 2. The estimate of the round before, and the clip to CB.
    tilt = alpha * state["estimate"] if momentum else np.zeros_like(state["estimate"])
    tilted = [g + tilt for g in gradients]
    norms = f64([norm(g) for g in tilted])
    bound = clip if momentum and staleness else math.inf
    one = shrink(norms, bound)
    tilted = [c * g for c, g in zip(one, tilted, strict=True)]
    # 3. The estimate.
    a = exponential(tau - tau.min()) if staleness else np.ones(len(buffer))
    estimate, _ = total(a / a.sum(), tilted)
    # 4. Who agrees with it.
    length = norm(estimate)
    clipped = f64([norm(g) for g in tilted])
    cosines = np.clip([cosine(g, estimate) for g in tilted], -1.0, 1.0)
    accepted = cosines >= sim_min if selection else np.ones(len(buffer), bool)
    # 5. The clip of stage two.
    two = shrink(clipped, stage_two_clip * length if stage == 2 else math.inf)
    # 6. The step.
    if selection and accepted.any():
        p = np.where(accepted, np.exp(beta * (cosines - cosines.max())), 0.0)  # up to a factor: no overflow
        p = p / p.sum()
        factors = p * two * one
        direction, _ = total(p * two, tilted)
    else:
        factors, direction = a / a.sum() * one, estimate
    lr = server_lr / (1 + gamma * tau.min()) if staleness else server_lr
    _, terms = total(factors, [np.abs(g) + np.abs(tilt) for g in gradients])
    kept = estimate if memory == "estimate" else direction
    after = moved(state, state["params"] - lr * direction, estimate=kept, stage=stage)
    fired = {"clip": one < 1, "stage two clip": two < 1, "all rejected": not accepted.any(), "stage": stage == 2}
    margins = {
        "accepted": np.abs(cosines - sim_min) if selection else np.full(len(buffer), math.inf),
        "clip": np.abs(norms / bound - 1),
        "stage two clip": np.abs(clipped / (stage_two_clip * length) - 1) if length > 0 else np.zeros(len(buffer)),
        "stage": abs(losses.mean() / stage_two_loss - 1) if stage_two_loss else math.inf,
    }
    more = {"fired": fired, "margins": margins, "cosines": cosines, "first_clip": one, "second_clip": two,
            "estimate_weights": a / a.sum(), "memory_part": float(factors.sum()) * (alpha if momentum else 0.0),
            "estimate_length": length}  # fmt: skip
    return after, decided(factors, direction, terms, lr, accepted, **more)


def gsgm(state, buffer, *, server_lr=0.005, alpha=0.1):
    """direction = alpha momentum + mean(g); a pass over all clients ends with momentum = mean of its directions."""
    *_, gradients = facts(buffer)
    weights = np.full(len(buffer), 1 / len(buffer))
    mean, terms = total(weights, gradients)
    direction = alpha * state["momentum"] + mean
    terms = terms + np.abs(alpha * state["momentum"])
    pass_sum, rounds = state["pass_sum"] + direction, state["rounds_in_pass"] + 1
    entered, momentum = state["entered"] + len(buffer), state["momentum"]
    ends = entered == state["num_clients"]
    if ends:
        momentum, pass_sum, rounds, entered = pass_sum / rounds, np.zeros_like(mean), 0.0, 0
    new = {"momentum": momentum, "pass_sum": pass_sum, "rounds_in_pass": rounds, "entered": entered}
    after = moved(state, state["params"] - server_lr * direction, **new)
    return after, decided(weights, direction, terms, server_lr, fired={"pass ends": ends}, margins={"pass ends": 1.0})


def zenopp(state, buffer, *, server_lr=0.005, gamma=0.1, rho=0.02, epsilon=0.1, scaled=True):
    """Accepted iff gamma <v, g^> - rho |g^|^2 >= -gamma epsilon, g^ = g |v| / |g|; unscaled: |g|^2 in the middle."""
    *_, (gradient,) = facts(buffer)
    validation, length = state["validation"], norm(gradient)
    scale = norm(validation) / length if length > 0 else 0.0
    hat = scale * gradient
    agreement, size = gamma * inner(validation, hat), rho * (norm(hat) ** 2 if scaled else length**2)
    accepted = length > 0 and agreement - size >= -gamma * epsilon
    margin = abs(agreement - size + gamma * epsilon) / (abs(agreement) + size + gamma * epsilon) if length > 0 else 1.0
    more = {"margins": {"accepted": f64([margin])}, "stepped": accepted}
    decisions = decided([scale if accepted else 0.0], hat, np.abs(hat), server_lr, np.array([accepted]), **more)
    return (moved(state, state["params"] - server_lr * hat) if accepted else state), decisions


ROUNDS = {
    "fedavg": fedavg,
    "fedbuff": fedbuff,
    "fedasync": fedasync,
    "fedadam": adaptive("adam"),
    "fedyogi": adaptive("yogi"),
    "fedadagrad": adaptive("adagrad", beta1=0.0),
    "fedams": adaptive("amsgrad", epsilon=1e-8),
    "fadas": fadas,
    "afa_cd": afa_cd,
    "afa_cs": afa_cs,
    "ca2fl": ca2fl,
    "mf_ca2fl": mf_ca2fl,
    "wkafl": wkafl,
    "twafl": twafl,
    "sasgd": sasgd,
    "gsgm": gsgm,
    "zenopp": zenopp,
}
