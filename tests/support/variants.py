"""What the contract suite walks: every preset and its options, the traces that it plays, and the state it sees."""

from dataclasses import dataclass

import numpy as np

import oracle
import presets
from afflux import Server
from afflux.rules import RULES
from afflux.rules.staleness import Constant, Exponential, Hinge, Polynomial

SIZE, CLIENTS, BUFFER = 300, 12, 5


@dataclass(frozen=True, slots=True)
class Mine:
    """A part of one's own, which is not registered, and whose class has no namesake in afflux."""

    clip: float = 1.0

    def __call__(self, arrivals, /):
        return np.full(len(arrivals), self.clip / len(arrivals))


LAWS = {"constant": Constant, "polynomial": Polynomial, "hinge": Hinge, "exponential": Exponential}
#: {id: (rule, options in the oracle's words)}
VARIANTS = {name: (name, {}) for name in RULES} | presets.VARIANTS
#: {id: (options of the server, type of params, type of a pushed vector)}
TYPES = {
    "float32": ({}, "float32", "float32"),
    "float64": ({"dtype": "float64"}, "float64", "float64"),
    "bfloat16": ({"slot_dtype": "bfloat16"}, "float32", "bfloat16"),
    "float64, bfloat16": ({"dtype": "float64", "slot_dtype": "bfloat16"}, "float64", "bfloat16"),
}


def make(variant, **more):
    """The preset, with buffers of BUFFER where it has a choice."""
    name, options = VARIANTS[variant]
    options = {key: value for key, value in options.items() if key != "duplicates"} | more
    if isinstance(options.get("staleness"), tuple):
        law, *numbers = options["staleness"]
        options["staleness"] = LAWS[law](*numbers)
    single = name in ("fedasync", "zenopp")
    return RULES[name](**({} if single else {"buffer_size": BUFFER}) | options)


def round_options(variant):
    """The options of one round, for the oracle."""
    return {key: value for key, value in VARIANTS[variant][1].items() if key not in ("initial_v", "duplicates")}


def twice(variant):
    """Whether a client may be in a buffer twice, and both arrivals count."""
    rule = make(variant)
    both = not rule.calibrate.cached or VARIANTS[variant][1].get("duplicates") == "both"
    return both and not (rule.needs.passes or rule.needs.once)


def serve(variant, params=None, **options):
    params = np.linspace(-1, 1, SIZE) if params is None else params
    duplicates = VARIANTS[variant][1].get("duplicates")
    return Server(make(variant), params, num_clients=CLIENTS, duplicates=duplicates, **options)


def draw(rng, common):
    """A vector that mostly agrees with a common one; norms differ by a factor of 10."""
    vector = rng.choice([1.5, 0.7, -1.0], p=[0.6, 0.2, 0.2]) * common + rng.standard_normal(len(common))
    return vector * 10 ** rng.uniform(-0.5, 0.5)


def cohorts(rng, variant, rounds):
    """Who is in each round: anyone, twice too where both count; once per pass where there are passes."""
    rule = make(variant)
    if not rule.needs.passes:
        return [rng.choice(CLIENTS, rule.buffer_size, replace=twice(variant)) for _ in range(rounds)]
    passes = [rng.permutation(CLIENTS) for _ in range(rounds)]
    return [one[i : i + BUFFER] for one in passes for i in range(0, CLIENTS, BUFFER)][:rounds]


def trace(variant, rounds, seed, size=SIZE):
    """Rounds of (client, wanted staleness, examples, loss, float64 vector) in the order of their joins."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(size)
    for i, clients in enumerate(cohorts(rng, variant, rounds)):
        loss = 1.1 - i / rounds
        yield [
            (int(c), int(rng.integers(0, 7)), int(rng.integers(1, 50)), loss * rng.uniform(0.9, 1.1), draw(rng, common))
            for c in clients
        ]


def stored(vector, kind):
    """What a slot of this type keeps of a vector."""
    return oracle.bfloat16(vector) if kind == "bfloat16" else vector.astype(kind)


def push(server, joins, kind="float32"):
    """Pushes them; the receipts, and what is in the buffer then, in canonical order, for the oracle."""
    version, receipts, buffer = server.version, [], []
    for number, (client, staleness, examples, loss, vector) in enumerate(joins):
        pulled = version - min(staleness, version)
        sent = vector if kind == "float64" else vector.astype(np.float32)
        receipts.append(
            server.push(client=client, **{server.rule.kind: sent}, version=pulled, num_examples=examples, loss=loss)
        )
        buffer.append(((client, pulled, number), (client, version - pulled, examples, loss, stored(sent, kind))))
    return receipts, [arrival for _, arrival in sorted(buffer, key=lambda pair: pair[0])]


def state(server, entered=0):
    """What the oracle starts a round from."""
    rows = {} if server.rows is None else {c: oracle.f64(server.rows.row(c)) for c in server.rows.client_ids}
    vectors = {name: oracle.f64(vector) for name, vector in server.rule_vectors.items()}
    facts = {"params": oracle.f64(server.params), "version": server.version, "num_clients": CLIENTS}
    return facts | {"rows": rows, "entered": entered} | vectors | server.scalars
