"""One contract for every way in which a server is kept: as a state, in a store that is closed, and by a checkpoint of a
process that ends at once. The server goes on with the bits, the log and the counts of one that was never interrupted.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from afflux import Layout, Server
from afflux.rules import ca2fl, fadas, fedadam, fedavg, fedbuff, gsgm, mf_ca2fl, weights, wkafl
from afflux.store import stored_state
from conftest import ready
from inside import aggregator_of
from stores import same, through_a_file
from variants import VARIANTS, serve, trace
from variants import push as push_joins

D = 300


class Save:
    """A way to keep a server: the options with which it is made, and the server that comes back."""

    def __init__(self, way, folder):
        self.way, self.folder = way, folder
        self.options = {} if way == "state" else {"store": folder / "store"}

    def restored(self, server, make):
        """The same server once more; `make` makes a new one, with other params, that loads a state."""
        if self.way == "state":
            other = make()
            other.replace_rule(server.rule)
            other.load_state_dict(through_a_file(server.state_dict()))
            return other
        if self.way == "closed":
            server.close()
            return Server.open(self.folder / "store", server.rule)
        server.checkpoint()
        shutil.copytree(self.folder / "store", self.folder / "copy")
        return Server.open(self.folder / "copy", server.rule)


@pytest.fixture(params=["state", "closed", "killed"])
def save(request, tmp_path):
    return Save(request.param, tmp_path)


def goes_on(save, make, play, cut, end):
    """Plays `end` pushes, interrupted after `cut`, and compares the server with one that was not."""
    straight, first = make(), make(**save.options)
    for server in (straight, first):
        for number in range(cut):
            play(server, number)
    again = save.restored(first, make)
    same(again, straight)
    for number in range(cut, end):
        for server in (straight, again):
            play(server, number)
    same(again, straight)
    assert straight.version > 1
    return again


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rule(save, variant):
    """Amid a buffer, and with rows, vectors and numbers of its own."""
    shapes = set()
    joins = [(first, join) for joins in trace(variant, 9, 10) for first, join in enumerate(joins)]

    def play(server, number):
        first, join = joins[number]
        if first == 0:
            ready(server, join[-1].astype(np.float32))
        push_joins(server, [join])
        shapes.add(tuple((name, v.shape, v.dtype.str) for name, v in server.rule_vectors.items()))

    def make(**options):
        return serve(variant, log=True, **options)

    goes_on(save, make, play, len(joins) // 2 + 1, len(joins))
    assert len(shapes) == 1


def update(number):
    return np.random.default_rng(number).integers(-9, 9, D).astype(np.float32)


def ordinary(server, number):
    facts = {"version": max(0, server.version - number % 3), "num_examples": 1 + number % 4, "loss": 1 / (1 + number)}
    server.push(client=number * 7 % 5, **{server.rule.kind: update(number)}, **facts)


#: {id: (rule, options of the server)}
SETTINGS = {
    "float64": (ca2fl(buffer_size=3), {"dtype": "float64"}),
    "bfloat16": (ca2fl(buffer_size=3), {"slot_dtype": "bfloat16"}),
    "both": (ca2fl(buffer_size=3), {"duplicates": "both"}),
    "two bits of both": (ca2fl(buffer_size=3, codec="affine-2"), {"duplicates": "both", "slot_dtype": "bfloat16"}),
    "rotated float64": (ca2fl(buffer_size=3, codec="rotated-4"), {"dtype": "float64"}),
    "reject": (ca2fl(buffer_size=3), {"duplicates": "reject"}),
    "versions and slots": (ca2fl(buffer_size=3), {"max_versions": 3, "max_slots": 5}),
    "max_staleness": (fedbuff(buffer_size=3), {"max_staleness": 1, "duplicates": "latest"}),
    "a seed": (mf_ca2fl(buffer_size=3, bits=1), {"seed": 5}),
    "max_norm": (fadas(buffer_size=3), {"max_norm": 90.0, "faults": "record"}),
    "streaming": (fedbuff(buffer_size=3), {"accumulate": True}),
    "streaming a mean": (fedavg(buffer_size=3), {"accumulate": True}),
    "a window of norms": (fedadam(buffer_size=3), {"clip_norms": 1.1}),
    "passes": (gsgm(buffer_size=3), {}),
    "momentum": (wkafl(buffer_size=3), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(save, name):
    rule, options = SETTINGS[name]

    def make(**more):
        return ready(Server(rule, np.full(D, 0.5), num_clients=5, log=True, **options, **more))

    goes_on(save, make, ordinary, 17, 40)


@pytest.mark.parametrize("accumulate", [False, True])
def test_facts(save, accumulate):
    rule = replace(fedbuff(buffer_size=3), weigh=weights.Given("quality"))

    def play(server, number):
        facts = {"quality": number + 0.5} | ({"tokens": 5e-324} if number % 2 else {})
        steps = number % 3 or None
        server.push(client=number, update=update(number), version=server.version, facts=facts, local_steps=steps)

    def make(**options):
        return Server(rule, np.ones(D), log=True, facts=("tokens",), accumulate=accumulate,
                      **options)  # fmt: skip

    assert goes_on(save, make, play, 7, 14).options.facts == ("tokens",)


def test_ids_of_every_kind(save):
    ids = ["ann", "böb", "\0", "日本", 7, -3, 2**62, "7"]

    def play(server, number):
        server.push(client=ids[number % len(ids)], update=update(number), version=server.version)

    def make(**options):
        return Server(ca2fl(buffer_size=2), np.ones(D), num_clients=len(ids), log=True, **options)

    again = goes_on(save, make, play, 11, 24)
    assert sorted(map(repr, again.rows.client_ids)) == sorted(map(repr, ids))


def test_models(save):
    """Roles of arrays: parameters, statistics, counters, constants and copied arrays."""
    start = {
        "w": np.ones((4, 5), np.float32),
        "bn": {"mean": np.zeros(3, np.float32), "steps": np.array(0)},
        "mask": np.array([0.0, -np.inf], np.float32),
        "key": np.arange(2, dtype=np.uint32),
    }
    roles = {"bn.*": "statistic", "mask": "constant", "key": "copied"}

    def play(server, number):
        vary = {"mean": np.full(3, number, np.float32), "steps": np.array(number)}
        tree = {"w": np.full((4, 5), number, np.float32), "bn": vary, "key": np.full(2, number, np.uint32)}
        server.push(
            client=number, model=tree | {"mask": start["mask"]}, version=server.version, num_examples=number + 1
        )

    def make(**options):
        return Server(fedavg(buffer_size=2), start, layout=Layout.of(start, roles=roles), log=True, **options)

    again = goes_on(save, make, play, 3, 8)
    tree = again.checkout("ann").tree()
    assert again.layout.roles == Layout.of(start, roles=roles).roles
    assert (tree["mask"].tolist(), tree["key"].tolist()) == ([0.0, -np.inf], [7, 7])


def test_norms_that_overflow(save):
    def play(server, number):
        server.push(client=number, update=np.full(D, 1e200 * (number % 2)), version=server.version)

    def make(**options):
        return Server(fedavg(buffer_size=2), np.zeros(D), dtype="float64", max_abs=1e200, log=True, **options)

    goes_on(save, make, play, 3, 8)


def test_other_calls_than_pushes(save):
    """A flush, a discard, a vector that is handed in, a rule that waits to replace this one."""

    def play(server, number):
        ordinary(server, number)
        if number in (2, 21):
            server.flush()
        if number in (5, 19):
            server.discard()
        if number in (7, 16):
            server.replace_rule(ca2fl(buffer_size=number // 4, server_lr=0.25))

    def make(**options):
        return Server(ca2fl(buffer_size=3), np.ones(D), num_clients=5, log=True, **options)

    goes_on(save, make, play, 17, 30)


def test_a_commit_writes_the_clients_that_have_entered_since_the_last_one(tmp_path):
    server = Server(gsgm(buffer_size=2), np.zeros(2), num_clients=9, store=tmp_path / "store")
    updates, written = [], stored_state.WrittenLists()
    for client in range(6):
        server.push(client=client, version=server.version, gradient=np.ones(2))
        update, written = stored_state.list_updates(aggregator_of(server).admission.state, written)
        updates.append((update["passed"].start, len(update["passed"].entries)))
    assert updates == [(0, 1), (0, 2), (2, 1), (2, 2), (4, 1), (4, 2)]  # those in the buffer are written again
