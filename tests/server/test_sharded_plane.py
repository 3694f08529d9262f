"""A server whose vectors are in shards has the bits of one whose vectors are in one piece."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, product

import numpy as np
import pytest

import pairwise
from afflux import AffluxError, Server, UnavailableError, ops, rules
from afflux.aggregation.local_plane import LocalPlane, LocalRound
from afflux.aggregation.plane import DataPlane
from afflux.aggregation.sharded_plane import ShardedPlane, ShardedRound, subtrees
from afflux.selftest.digest import vectors
from conftest import Dlpack, bits, check_error, push_all, ready, same_state
from sharded_runs import CASES, SUPERBLOCK, D, Interrupts, M, repeated, served
from surroundings import flushed_subnormals


@pytest.fixture(scope="module")
def data():
    return vectors(3, 6, D)


@pytest.fixture(scope="module")
def whole(data):
    """What a server in one piece has, by case."""
    results = {}
    return lambda case: results.setdefault(case, served(*CASES[case], data))


NOW = [(case, (2, 3, 5)[i % 3]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(
    ("case", "shards"), [*NOW, *pairwise.soak_all([*{*product(CASES, (1, 2, 3, 5))}.difference(NOW)])]
)
def test_shards_have_the_bits_of_one_piece(case, shards, data, whole):
    state, reports, log = served(*CASES[case], data, ShardedPlane(shards))
    expected, expected_reports, expected_log = whole(case)
    same_state(state, expected)
    assert (reports, log) == (expected_reports, expected_log)
    rule, options = CASES[case]
    states = []
    for plane in (None, ShardedPlane(cuts=(1, 6))):  # both load the state of the server in one piece, and go on
        loaded = Server(rule, data[0], log=True, plane=plane, **options)
        loaded.load_state_dict(expected)
        if plane:
            same_state(loaded.state_dict(), expected)
        push_all(loaded, range(M if rule.calibrate.cached else 0), lambda i: data[i])
        states.append(loaded.state_dict()["arrays"])
    assert all(bits(states[0][name]) == bits(array) for name, array in states[1].items())


@pytest.mark.parametrize("total", [1, 2, 3, 5, 8, 11, 12])
def test_each_shard_has_the_largest_subtrees_in_its_range(total):
    """One sum for each shard would have other bits: params hide that, norms do not."""
    for begin in range(total):
        for end in range(begin + 1, total + 1):
            nodes = subtrees(begin, end, total)
            assert [leaf for first, count in nodes for leaf in range(first, first + count)] == [*range(begin, end)]
            assert len(nodes) <= 2 * total.bit_length()
    assert subtrees(0, total, total) == [(0, total)]


def test_the_squares_of_parts_have_the_bits_of_the_whole(data):
    """With weights that let no two orders of the sums agree."""
    whole, rng = Server(rules.fedbuff(buffer_size=9), data[0]), np.random.default_rng(0)
    vector = (rng.standard_normal(D) * np.exp(3 * rng.standard_normal(D))).astype(np.float32)
    whole.push(client=1, version=0, update=vector)
    expected, sums = whole.state_dict()["meta"]["waiting"], set()
    for cuts in [(1,), (7,), (3, 9), (5, 6), (2, 4, 10, 11)]:
        server = Server(rules.fedbuff(buffer_size=9), data[0], plane=ShardedPlane(cuts=cuts))
        server.push(client=1, version=0, update=vector)
        assert server.state_dict()["meta"]["waiting"] == expected
        squares = [
            ops.ingest(part, part.copy()).sum_of_squares for part in np.split(vector, np.array(cuts) * SUPERBLOCK)
        ]
        sums.add(sum(squares))
    assert len(sums) > 1


UNDISTURBED = {"allocate", "slots_taken", "versions_held", "wait"}
#: The calls of the interfaces, of the whole plane and its rounds, and of their parts.
CALLS = [
    *product((LocalPlane, ShardedPlane), sorted(DataPlane.__abstractmethods__ - UNDISTURBED)),
    *product((LocalRound, ShardedRound), ("make", "publish", "release")),
]
REPEATED = {
    "ca2fl": (rules.ca2fl(buffer_size=2, codec="affine-4"), {"num_clients": 9}),
    "fadas": (rules.fadas(buffer_size=2), {}),
    "wkafl": (rules.wkafl(buffer_size=2), {}),
    "accumulate": (rules.fedbuff(buffer_size=3), {"accumulate": True}),
    "zenopp": (rules.zenopp(), {"accumulate": False}),
}


#: The calls that read and write vectors outside of rounds.
WRITES = {"fill", "read", "shown", "version"}


def disturbed(case, data, interrupts=None):
    """The state of a server each of whose calls is repeated after an interrupt, if it has not joined."""
    rule, options = REPEATED[case]
    server = Server(rule, data[0][:SIZE], log=True, plane=ShardedPlane(cuts=(1,)), **options)
    base = server.pull()
    ready(server, data[4][:SIZE])
    if interrupts is not None:
        interrupts.calls = 0  # of the calls that are repeated: not those of the constructor are not repeated
    for i in range(5):
        vector = data[i][:SIZE] * np.float32(2.0**-12)
        vectors = {"model": data[0][:SIZE] + vector} if i == 1 else {rule.kind: vector}
        while server.joins == i:
            with suppress(KeyboardInterrupt):
                server.push(client=i, version=base, client_lr=0.1, local_steps=2, **vectors)
    state, log = repeated(server.state_dict), server.log
    loading = partial(server.load_state_dict, state)
    for call in (loading, server.flush, server.pull, lambda: server.rule_vectors, lambda: server.rows):
        repeated(call)
    for name in rule.needs.handed_in:
        repeated(lambda name=name: server.set_rule_vector(name, data[5][:SIZE]))
    repeated(lambda: server.replace_rule(replace(rule, buffer_size=9)))
    return state, log, repeated(server.state_dict)["arrays"]


#: Three superblocks, in two shards.
SIZE = 2 * SUPERBLOCK + 77


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", REPEATED)
def test_each_call_may_be_repeated_until_it_has_returned(case, after, data, monkeypatch):
    expected, log, last = disturbed(case, data)
    step = 1 if pairwise.soaking else 7
    for number in count(0, step):
        with monkeypatch.context() as patch:
            interrupts = Interrupts(patch, CALLS, number, after)
            state, again, arrays = disturbed(case, data, interrupts)
        same_state(state, expected)
        assert again == log, number
        assert all(bits(arrays[name]) == bits(last[name]) for name in last), number
        if interrupts.calls <= number:
            break
    assert number > 60
    assert interrupts.names >= {"reserve", "ingest", "prepare", "make", "publish", "release", *WRITES}


def test_a_plane_is_for_one_server_on_the_cpu(tmp_path, monkeypatch):
    plane = ShardedPlane(2)
    Server(rules.fedbuff(), np.zeros(3), plane=plane)
    check_error(r"\[Server\] plane was given to a server before", Server, rules.fedbuff(), np.zeros(3), plane=plane)
    check_error(r"\[Server\] plane is 3, must be a DataPlane", Server, rules.fedbuff(), np.zeros(3), plane=3)

    monkeypatch.setattr("afflux.aggregation.plane.StoredPlane", ShardedPlane)
    with pytest.raises(UnavailableError, match="a store cannot hold the vectors of this plane"):
        Server(rules.fedbuff(), np.zeros(3), plane=LocalPlane(), store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_errors_name_the_elements_and_arrays_of_the_whole(data):
    bad = data[1].copy()
    bad[5 * SUPERBLOCK + 3] = np.nan
    server = Server(rules.fedbuff(), data[0], plane=ShardedPlane(3), max_abs=1e30)
    check_error(f"non-finite value at index {5 * SUPERBLOCK + 3}", server.push, client=1, version=0, update=bad)
    bad[5 * SUPERBLOCK + 3] = 2e30
    check_error(f"at index {5 * SUPERBLOCK + 3}", server.push, client=1, version=0, update=bad)
    tree = {"a": data[0][: 3 * SUPERBLOCK + 5].reshape(-1, 1), "b": data[1][: 2 * SUPERBLOCK]}
    trees = Server(rules.fedbuff(buffer_size=1), tree, plane=ShardedPlane(3))
    one = Server(rules.fedbuff(buffer_size=1), tree)
    for each in (trees, one):
        with pytest.raises(AffluxError, match=r"client 1's update: \[layout\] b is complex128"):
            each.push(client=1, version=0, update={**tree, "b": np.zeros(2 * SUPERBLOCK, complex)})
        each.push(client=1, version=0, update=tree)
        each.push(client=1, version=each.pull(), model={**tree, "b": tree["b"].astype(np.float16)})
    assert bits(trees.params) == bits(one.params)


def test_vectors_that_only_the_engine_reads_get_the_type_of_their_place(data):
    """Not that of the slots."""
    vector = data[1][:SIZE]
    server = Server(rules.zenopp(), Dlpack(vector), slot_dtype="bfloat16", plane=ShardedPlane(2))
    server.set_rule_vector("validation", Dlpack(vector))
    assert bits(server.params) == bits(server.rule_vectors["validation"]) == bits(vector)


@pytest.mark.parametrize("more", [-SUPERBLOCK, 1])
def test_a_base_of_another_size_is_refused(more, data):
    server = Server(rules.fedbuff(), data[0][:SIZE], plane=ShardedPlane(2))
    other = Server(rules.fedbuff(), data[0][: SIZE + more]).pull()
    check_error(f"{SIZE + more} elements, expected {SIZE}", server.push, client=1, version=other, model=data[0][:SIZE])


def test_two_pushes_do_not_keep_the_last_slot_from_each_other(monkeypatch):
    """Both would wait, or raise BusyError, if each had a slot of some shards only."""
    plane, held, reserve = ShardedPlane(2), [], LocalPlane.reserve
    server = Server(rules.fedbuff(buffer_size=1), np.zeros(SIZE, np.float32), max_slots=1, plane=plane)

    def interrupted(own, **options):
        if own is plane.planes[-1] and len(held) < len(plane.planes):
            assert plane.reserve() is None  # of another thread
        held.append(reserve(own, **options))
        return held[-1]

    monkeypatch.setattr(LocalPlane, "reserve", interrupted)
    assert server.push(client=1, version=0, update=np.zeros(SIZE, np.float32), timeout=0).status == "joined"


def test_the_squares_of_shards_are_added_in_the_engines_floating_point_mode():
    vector, states = np.zeros(SIZE), []
    vector[[0, SUPERBLOCK, -1]] = 1.6e-154, 1.2e-154, 1e-154  # two of the squares are subnormal
    for flush, plane in ((False, None), (True, None), (True, ShardedPlane(2))):
        server = Server(rules.fedbuff(), np.zeros(SIZE), dtype="float64", plane=plane)
        with flushed_subnormals(flush):
            server.push(client=1, version=0, update=vector)
        states.append(server.state_dict()["meta"])
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("wrong", [{"shards": 0}, {"shards": -1}, {"shards": "2"}, {"cuts": [1.5]}, {"cuts": [-1]}])
def test_shards_and_cuts_are_numbers(wrong):
    check_error(rf"\[ShardedPlane\] {next(iter(wrong))} is .*, must be an int of at least", ShardedPlane, **wrong)
