"""Lent vectors (push(copy=False)): the bits of copied ones, no slot, and the round finds values that are not finite."""

import gc
import json
import weakref

import numpy as np
import pytest

import afflux
import presets
from afflux import AffluxError, Calibrate, Needs, Rule, Server, UnavailableError, ops, replay
from afflux.aggregation.local_plane import LocalPlane
from afflux.ops import Step
from afflux.rules import RULES, fadas, fedasync, fedbuff
from conftest import ISAS, THREADS, FakeCuda, awkward, bits
from inside import slots_taken
from pairwise import pairwise

#: They need a vector only in the sweep of its round.
LENDING = [name for name in RULES if name not in presets.NOT_STREAMED]
COPYING = sorted(set(RULES) - set(LENDING))
M = 4


class All:
    """Every weight is 1."""

    def __call__(self, arrivals):
        return np.ones(len(arrivals))


class First:
    """The first arrival alone."""

    def __call__(self, arrivals):
        return np.eye(len(arrivals))[0]


class Tiny:
    """The first weight is the least positive number."""

    def __call__(self, arrivals):
        return np.array([5e-324, 1.0])


def plain(weigh, buffer_size):
    return Rule("plain", "update", buffer_size, weigh, Calibrate(cached=False), lambda arrivals: Step("sgd"))


def made(name="fedbuff", size=50, **options):
    return Server(RULES[name](), np.zeros(size), num_clients=100, **options)


def rounds(server, vectors, copy, rounds=3):
    """All vectors, round after round, each with a staleness of its own."""
    reports = []
    for turn in range(rounds):
        for i, vector in enumerate(vectors):
            version = max(0, server.version - (i + turn) % 3)
            report = server.push(
                client=i, **{server.rule.kind: vector}, version=version, num_examples=1 + i, copy=copy
            ).report
            reports += [report] if report else []
    return reports


@pairwise(
    "isa, num_threads, size, name, form, inplace",
    ISAS,
    THREADS,
    [0, 1, 33, 2049, 3 * 65536 + 5],
    LENDING,
    ["flat", "tree"],
    [False, True],
    indirect=["isa"],
)
def test_the_bits_are_those_of_copies(isa, rng, name, size, num_threads, form, inplace):
    """As in a vector, so in the arrays of a tree: some are empty, or shorter than a block."""
    vectors = [awkward(rng, size) for _ in range(10)]
    borders = np.array([0, 1, 1, 40, 2048]) * size // 2049
    options = {"num_threads": num_threads, "inplace": inplace}
    lent, copied = (made(name, size, **options) for _ in range(2))
    if form == "tree" and size:
        lent = Server(RULES[name](), np.split(np.zeros(size), borders), num_clients=100, **options)
    given = vectors if form == "flat" or not size else [np.split(vector, borders) for vector in vectors]
    ours, theirs = rounds(lent, given, False), rounds(copied, vectors, True)
    assert bits(lent.params) == bits(copied.params)
    for vector, other in zip(lent.rule_vectors.values(), copied.rule_vectors.values(), strict=True):
        assert bits(vector) == bits(other)
    assert len(ours) == len(theirs) >= 3
    for one, other in zip(ours, theirs, strict=True):
        assert bits(one.weights) == bits(other.weights)
        assert (one.client_ids, one.rejected, one.version) == (other.client_ids, other.rejected, other.version)
        assert np.isnan(one.norms).all()


def test_float64_and_bfloat16_are_lent_as_they_are(rng):
    torch = pytest.importorskip("torch")
    wide = [rng.standard_normal(70) for _ in range(10)]
    narrow = [torch.from_numpy(v).to(torch.bfloat16) for v in wide]
    for vectors, options in [(wide, {"dtype": "float64"}), (narrow, {"slot_dtype": "bfloat16"})]:
        lent, copied = (made(size=70, **options) for _ in range(2))
        rounds(lent, vectors, False)
        rounds(copied, vectors, True)
        assert bits(lent.params) == bits(copied.params)
    narrow[3][5] = float("inf")
    report = rounds(made(size=70, slot_dtype="bfloat16"), narrow, False, rounds=1)[0]
    assert report.rejected[3] == "non-finite value at index 5"


class OnlyDlpack:
    """Neither NumPy nor the buffer protocol has this type."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_what_numpy_cannot_read_is_kept_in_a_state_and_looked_at_in_a_round():
    jax = pytest.importorskip("jax")
    values = [1.0, 2.0, 3.5]
    narrow = jax.numpy.array(values, "bfloat16")
    server = Server(fedbuff(buffer_size=3), np.zeros(3), slot_dtype="bfloat16")
    server.push(client=1, update=narrow, version=0, copy=False)
    (slot,) = server.state_dict()["arrays"]["slots"]
    assert (slot.astype(np.uint32) << 16).view(np.float32).tolist() == values
    server = Server(fedbuff(buffer_size=2), np.zeros(3, np.float32))
    server.push(client=1, update=OnlyDlpack(np.array([1.0, np.nan, 2.0], np.float32)), version=0, copy=False)
    assert np.isnan(server.state_dict()["arrays"]["slots"][0, 1])
    report = server.push(client=2, update=OnlyDlpack(np.array(values, np.float32)), version=0, copy=False).report
    assert report.rejected == ("non-finite value at index 1", "")
    assert server.params.tolist() == [0.5, 1.0, 1.75]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 700, 2048, 70_000])
def test_a_round_without_what_is_not_finite(isa, rng, value, index):
    vectors = [awkward(rng, 70_001) for _ in range(M)]
    vectors[2][index] = value
    server = Server(fedbuff(buffer_size=M, server_lr=0.5), np.zeros(70_001), num_threads=2)
    report = rounds(server, vectors, False, rounds=1)[0]
    assert report.weights.tolist() == [0.25, 0.25, 0.0, 0.25]
    assert report.rejected == ("", "", f"non-finite value at index {index}", "")
    assert server.version == report.version == 1
    out = np.empty(70_001, np.float32)
    ops.apply(ops.Pass(np.zeros_like(out), out, ops.Combine(vectors, report.weights), step=Step("sgd", 0.5)))
    assert bits(server.params) == bits(out)
    server.push(client=0, update=vectors[0], version=1)  # goes on
    assert server.arrivals_waiting == 1


def test_models_keep_the_rest_of_params():
    """v = sum_i w_i (y_i - params): what is left out leaves its share of params out too."""
    server = Server(fedasync(alpha=0.5), np.full(3, 8.0))
    server.push(client=0, model=np.array([0, np.nan, 0], np.float32), version=0, copy=False)
    assert (server.version, server.params.tolist()) == (1, [8.0] * 3)
    server.push(client=0, model=np.array([4, 4, 4], np.float32), version=1, copy=False)
    assert server.params.tolist() == [6.0] * 3


def test_all_of_a_round_may_be_rejected():
    server = made(size=3)
    report = rounds(server, [np.full(3, np.inf, np.float32)] * 10, False, rounds=1)[0]
    assert (server.version, server.params.tolist(), report.weights.any()) == (1, [0.0] * 3, False)


def test_values_beyond_the_limit_are_rejected():
    vectors = [np.full(3, value, np.float32) for value in (1e15, 4e15, 1.0)]
    server = Server(plain(All(), 3), np.zeros(3))
    report = rounds(server, vectors, False, rounds=1)[0]
    assert report.rejected == ("", "value beyond max_abs at index 0", "")
    assert bits(server.params) == bits(np.full(3, np.float32(1e15)) + np.float32(1))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("buffer_size", [10, 40])
def test_the_verdict_on_a_vector_is_that_of_a_push_whatever_the_others_are(dtype, buffer_size):
    """A mean hides one large element among ten, and two large ones that cancel; each element is judged alone."""
    torch = pytest.importorskip("torch")
    wide = "float64" if dtype == "float64" else "float32"
    most = 2.0**200 if dtype == "float64" else 2.0**40
    for bad in ({3: 1.25}, {2: 1.5, 7: -1.5}, {buffer_size - 1: 1e20}, {}):
        server = Server(fedbuff(buffer_size=buffer_size), np.zeros(70), dtype=wide, slot_dtype=dtype, max_abs=most)
        for client in range(buffer_size):
            vector = torch.full((70,), most if client % 2 else -most, dtype=getattr(torch, dtype))
            vector[client] = bad.get(client, 1.0) * most
            report = server.push(client=client, version=0, update=vector, copy=False).report
        reasons = [f"value beyond max_abs at index {i}" if i in bad else "" for i in range(buffer_size)]
        assert report.rejected == tuple(reasons)
        assert np.isfinite(server.params).all()


def test_large_params_are_no_vectors_fault():
    """If they are a part of the direction, the limit of the direction is no limit of the vectors."""
    lent, copied = (Server(fedasync(alpha=0.5), np.full(3, 1e20, np.float32)) for _ in range(2))
    for server, copy in ((lent, False), (copied, True)):
        report = rounds(server, [np.ones(3, np.float32)], copy, rounds=1)[0]
        assert report.rejected == ("",)
    assert bits(lent.params) == bits(copied.params) == bits(np.full(3, 5e19, np.float32))


def test_a_weight_of_zero_is_not_looked_at():
    server = Server(plain(First(), 2), np.zeros(3))
    report = rounds(server, [np.ones(3, np.float32), np.full(3, np.nan, np.float32)], False, rounds=1)[0]
    assert (report.rejected, server.params.tolist()) == (("", "weight 0"), [1.0] * 3)


def test_subnormal_weights_count_in_the_callers_mode():
    torch = pytest.importorskip("torch")
    server = Server(plain(Tiny(), 2), np.zeros(3))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        report = rounds(server, [np.full(3, np.nan, np.float32), np.ones(3, np.float32)], False, rounds=1)[0]
    finally:
        torch.set_flush_denormal(False)
    assert (report.rejected, server.params.tolist()) == (("non-finite value at index 0", ""), [1.0] * 3)


def test_buffers_leave_out_what_is_rejected():
    torch = pytest.importorskip("torch")
    model = torch.nn.BatchNorm1d(3)
    server = Server(fedbuff(buffer_size=2), model)
    own = np.array([1.0, 2, 3, 4, 5, 6, 7])
    good, bad = np.ones(6, np.float32), np.full(6, np.nan, np.float32)
    server.push(client=0, update=good, version=0, buffers=own, copy=False)
    server.push(client=1, update=bad, version=0, buffers=-own, copy=False)
    assert server.pull().buffers.tolist() == own.tolist()


@pytest.mark.parametrize("name", COPYING)
def test_rules_that_keep_vectors_take_copies(name):
    server = made(name)
    before = server.state_dict()["meta"]["joins"]
    with pytest.raises(AffluxError, match=r"copy=False: the (update|gradient) cannot be read in place: " + name):
        server.push(client=7, **{server.rule.kind: np.ones(50, np.float32)}, version=0, copy=False)
    assert (server.counts["refused"], server.state_dict()["meta"]["joins"], slots_taken(server)) == (
        1,
        before,
        0,
    )


def test_a_rule_that_reads_norms_says_so():
    """Else its bits would depend on whether a vector was copied."""

    class Unsaid(All):
        def __call__(self, arrivals):
            return super().__call__(arrivals) / arrivals.norms

    server = Server(plain(Unsaid(), 1), np.zeros(3))
    before = server.state_dict()
    for call in (server.push, lambda **one: server.step([one])):
        with pytest.raises(AffluxError, match=r"norms are for rules whose weigh part has needs = Needs\(norms=True\)"):
            call(client=7, update=np.ones(3, np.float32), version=0)
    assert (server.version, server.arrivals_waiting) == (0, 0)
    assert bits(server.params) == bits(before["arrays"]["params"])


def test_a_rule_that_reads_norms_takes_copies():
    class Norms(All):
        needs = Needs(norms=True)

    server = Server(plain(Norms(), 2), np.zeros(3))
    with pytest.raises(AffluxError, match=r"copy=False: the update cannot be read in place: plain .*norm"):
        server.push(client=7, update=np.ones(3, np.float32), version=0, copy=False)
    assert (server.arrivals_waiting, server.counts["refused"]) == (0, 1)


def test_servers_that_take_copies(tmp_path):
    with pytest.raises(AffluxError, match="adds it up at once"):
        made(accumulate=True).push(client=7, update=np.ones(50, np.float32), version=0, copy=False)
    with made("fadas", store=tmp_path / "store", commit_every=2) as server:
        with pytest.raises(AffluxError, match="fadas overwrites its m, v, v_hat between two commits"):
            server.push(client=7, update=np.ones(50, np.float32), version=0, copy=False)
        assert server.counts["refused"] == 1


def test_a_state_with_a_lent_vector_that_is_not_finite(rng):
    """Loaded, it waits in a slot, and is as unchecked as before: its round leaves it out."""
    vectors = [np.full(50, np.nan, np.float32), *rng.standard_normal((2, 50), np.float32)]
    servers = [Server(fedbuff(buffer_size=3), np.zeros(50)) for _ in range(2)]
    for client, vector in enumerate(vectors[:2]):
        servers[0].push(client=client, update=vector, version=0, copy=False)
    servers[1].load_state_dict(servers[0].state_dict())
    reports = [server.push(client=2, update=vectors[2], version=0).report for server in servers]
    assert reports[0].rejected == reports[1].rejected == ("non-finite value at index 0", "", "")
    assert bits(servers[0].params) == bits(servers[1].params)


def test_a_lent_vector_of_a_store_that_then_commits_less_often(tmp_path):
    """It is checked when the store is opened, because later rounds overwrite what they read."""
    for value, where in ((np.nan, "bad"), (2.0, "good")):
        with made("fadas", store=tmp_path / where) as server:
            server.push(client=7, update=np.full(50, value, np.float32), version=0, copy=False)
            server.checkpoint()
    with pytest.raises(AffluxError, match=r"client 7 waits with a lent vector .* between two commits"):
        Server.open(tmp_path / "bad", commit_every=2)
    with Server.open(tmp_path / "good", commit_every=2) as server:
        assert server.flush().norms.tolist() == [np.sqrt(200.0)]


ONES = np.ones(101, np.float32)
MISALIGNED = np.frombuffer(bytes(401), np.uint8)[1:201].view(np.float32)


@pytest.mark.parametrize(
    ("vector", "error", "why"),
    [
        (np.ones(50), AffluxError, "is float64, expected float32"),
        (np.ones(50, np.int64), AffluxError, "is int64, expected float32"),
        (ONES[1:100:2], AffluxError, r"is strided \(step of 8 bytes\)"),
        (ONES[:49], AffluxError, "has 49 elements, params has 50"),
        (MISALIGNED, AffluxError, "is not aligned to 4 bytes"),
        (ONES.reshape(1, -1), AffluxError, r"has shape \(1, 101\), expected \(d,\)"),
        (ONES[:50].view(np.int32), AffluxError, r"\(copy=False\): it is int32, expected"),
        (FakeCuda(), UnavailableError, "cuda:1"),
    ],
    ids=["float64", "int64", "strided", "short", "misaligned", "matrix", "int32", "cuda"],
)
def test_what_cannot_be_lent(vector, error, why):
    server = made()
    if isinstance(vector, FakeCuda):
        vector.shape = (50,)
    with pytest.raises(error, match=why):
        server.push(client="ann", update=vector, version=0, copy=False)
    assert (server.arrivals_waiting, server.counts["refused"]) == (0, 1)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.ones((2, 3)), "b is float64, expected float32"),
        (np.ones((2, 3), np.int32), "b is int32, expected"),
        (np.ones((3, 2), np.float32).T, "b is not C-contiguous"),
    ],
    ids=["float64", "int32", "transposed"],
)
def test_an_array_of_a_tree_that_cannot_be_lent(array, why):
    server = Server(fedbuff(), {"a": np.zeros(2), "b": np.zeros((2, 3))})
    with pytest.raises(AffluxError, match=rf"\(copy=False\): {why}"):
        server.push(client=1, update={"a": np.ones(2, np.float32), "b": array}, version=0, copy=False)
    assert (server.arrivals_waiting, server.counts["refused"]) == (0, 1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["fedbuff", "fadas"])
def test_a_round_without_a_tree_that_is_not_finite(name, inplace):
    torch = pytest.importorskip("torch")
    server = Server(RULES[name](buffer_size=3), {"a": np.zeros((2, 2)), "b": np.zeros(3)}, inplace=inplace)
    copied = Server(RULES[name](buffer_size=3), np.zeros(7))
    for client, value in enumerate([1.0, np.nan, 3.0]):
        given = {"a": torch.ones(2, 2), "b": np.full(3, value, np.float32)}
        report = server.push(client=client, update=given, version=0, copy=False).report
        flat = np.concatenate([np.ones(4), given["b"]]).astype(np.float32)
        other = copied.push(client=client, update=flat, version=0, copy=False).report
    assert report.rejected == other.rejected == ("", "non-finite value at index 4", "")
    assert (server.version, bits(server.params)) == (1, bits(copied.params))


def test_the_state_and_the_log_of_lent_trees():
    model = {"a": {"x": np.zeros(2), "y": np.zeros((1, 3))}, "b": np.zeros(0)}
    given = {"a": {"x": np.ones(2, np.float32), "y": np.ones((1, 3), np.float32)}, "b": np.zeros(0, np.float32)}
    server, other = (Server(fadas(buffer_size=2), model, log=True) for _ in range(2))
    for client in range(3):
        server.push(client=client, update=given, version=0, copy=False)
    other.load_state_dict(through_json(server.state_dict()))
    assert [entry.lent for entry in server.log] == [True] * 3

    def again(_):
        given["a"]["x"] += 1  # the same tree each time
        return given

    repeated = replay(server.log, Server(fadas(buffer_size=2), model, log=True), again)
    assert bits(other.flush().weights) == bits(repeated.flush().weights)
    assert repeated.state_dict()["meta"]["log"] == other.state_dict()["meta"]["log"]
    assert repeated.params.tolist() != other.params.tolist()
    given["a"]["x"][:] = 1
    repeated = replay(server.log, Server(fadas(buffer_size=2), model, log=True), lambda _: given)
    repeated.flush()
    assert bits(repeated.params) == bits(other.params)


class Vector(np.ndarray):
    """An array that can be watched."""


def watched(size=50):
    vector = np.ones(size, np.float32).view(Vector)
    return vector, weakref.ref(vector)


@pytest.mark.parametrize("end", ["round", "discard", "flush"])
def test_a_vector_is_held_until_its_round_and_takes_no_slot(end):
    server = made(max_slots=10)
    vector, alive = watched()
    server.push(client=1, update=vector, version=0, copy=False)
    with pytest.raises(ValueError, match="resize"):
        vector.resize(7)
    del vector
    gc.collect()
    assert alive() is not None
    assert slots_taken(server) == 0
    if end == "round":
        rounds(server, [np.ones(50, np.float32)] * 9, True, rounds=1)
    else:
        getattr(server, end)()
    gc.collect()
    assert alive() is None


def _shrunk(tensor):
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda tensor: setattr(tensor, "data", tensor.new_zeros(3)), False),
        (lambda tensor: tensor.set_(tensor.new_zeros(3)), False),
        (lambda tensor: tensor.resize_(3), False),
        (lambda tensor: tensor.resize_(1 << 20), True),
        (_shrunk, True),
        (lambda tensor: tensor.share_memory_(), False),
    ],
    ids=["data", "set_", "resize_ down", "resize_ up", "storage", "share_memory_"],
)
def test_a_tensor_whose_memory_is_exchanged(change, refused, name):
    torch = pytest.importorskip("torch")
    dtype = "float64" if name == "float64" else "float32"
    server = Server(plain(All(), 2), np.zeros(200_000), dtype=dtype, slot_dtype=name)
    tensor = torch.full((200_000,), 3, dtype=getattr(torch, name))
    server.push(client=1, update=tensor, version=0, copy=False)
    if refused:
        with pytest.raises(RuntimeError, match="not resizable"):
            change(tensor)
    else:
        change(tensor)
    others = [torch.full((200_000,), 7, dtype=getattr(torch, name)) for _ in range(3)]
    server.push(client=2, update=others[0], version=0, copy=False)
    assert (server.params == 10).all()


def test_a_round_that_somebody_keeps_holds_no_vectors(monkeypatch):
    kept, server = [], made()
    prepare = afflux.server.aggregator.prepare
    monkeypatch.setattr(afflux.server.aggregator, "prepare", lambda *args: kept.append(prepare(*args)) or kept[-1])
    vector, alive = watched()
    server.push(client=0, update=vector, version=0, copy=False)
    del vector
    rounds(server, [np.ones(50, np.float32)] * 9, True, rounds=1)
    gc.collect()
    assert (len(kept), slots_taken(server), alive()) == (1, 0, None)


@pytest.mark.parametrize("copy", [0, 1, None, "no", np.zeros(1, bool)])
def test_copy_is_a_bool(copy):
    server = made()
    with pytest.raises(AffluxError, match=r"\[push\] copy is .*, must be True or False"):
        server.push(client=1, update=np.ones(50, np.float32), version=0, copy=copy)
    assert (server.arrivals_waiting, server.counts["refused"]) == (0, 1)
    server.push(client=1, update=np.ones(50, np.float32), version=0, copy=np.False_)
    assert slots_taken(server) == 0


def test_lent_and_copied_in_one_buffer(rng):
    vectors = [awkward(rng, 50) for _ in range(10)]
    mixed, copied = made(), made()
    for i, vector in enumerate(vectors):
        mixed.push(client=i, update=vector, version=0, copy=bool(i % 2))
        copied.push(client=i, update=vector, version=0)
    assert bits(mixed.params) == bits(copied.params)


def test_a_later_arrival_takes_the_place_of_a_lent_one():
    server = made(size=2, duplicates="latest")
    server.push(client=1, update=np.full(2, 10, np.float32), version=0, copy=False)
    assert server.push(client=1, update=np.full(2, 20, np.float32), version=0, copy=False).status == "replaced"
    server.flush()
    assert server.params.tolist() == [20.0] * 2


def through_json(state):
    return {"meta": json.loads(json.dumps(state["meta"])), "arrays": state["arrays"]}


@pytest.mark.parametrize("options", [{"accumulate": True}, {"max_norm": 1e12}])
def test_a_state_with_lent_vectors_where_vectors_are_copied(rng, options):
    """They are checked as a push checks them, and the round has their norms."""
    vectors = [awkward(rng, 50) for _ in range(5)]
    server, copied = made(), made(**options)
    for i, vector in enumerate(vectors):
        server.push(client=i, update=vector, version=0, copy=i % 2 == 0)
        copied.push(client=i, update=vector, version=0)
    state, other = through_json(server.state_dict()), made(**options)
    other.load_state_dict(state)
    ours, theirs = other.flush(), copied.flush()
    assert (bits(other.params), ours.norms.tolist()) == (bits(copied.params), theirs.norms.tolist())
    for value in (np.nan, 2e15):
        state["arrays"]["slots"][1, 3] = value
        with pytest.raises(AffluxError, match=r"client 1 waits with a lent vector .* a value at index 3 that is not f"):
            other.load_state_dict(state)
        assert (other.version, other.arrivals_waiting) == (1, 0)


def test_a_damaged_state_of_lent_vectors():
    server = made()
    server.push(client=1, update=np.ones(50, np.float32), version=0, copy=False)
    state = through_json(server.state_dict())
    state["meta"]["waiting"] = [[*w[:4], 1.0, *w[5:]] for w in state["meta"]["waiting"]]  # as if somebody had looked
    state["arrays"]["slots"][0, 3] = np.nan
    with pytest.raises(AffluxError, match=r"slots has a non-finite value at index \[0, 3\]"):
        made().load_state_dict(state)


def test_a_damaged_state_beside_a_lent_row():
    """An unread row may hold NaN; the message is about the other one."""
    server = made(size=5)
    server.push(client=1, update=np.full(5, np.nan, np.float32), version=0, copy=False)
    server.push(client=2, update=np.ones(5, np.float32), version=0)
    state = through_json(server.state_dict())
    made(size=5).load_state_dict(state)
    state["arrays"]["slots"][1, 3] = np.inf
    with pytest.raises(AffluxError, match=r"slots has a non-finite value at index \[1, 3\]"):
        made(size=5).load_state_dict(state)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_replay_from_one_array_that_is_filled_anew(rng, library):
    vectors = [awkward(rng, 50) for _ in range(23)]
    server = made(log=True)
    for turn, vector in enumerate(vectors):
        server.push(client=turn, update=vector, version=server.version, copy=turn % 3 == 0)
    scratch = np.empty(50, np.float32)
    torch = pytest.importorskip("torch") if library == "torch" else None
    jax = pytest.importorskip("jax") if library == "jax" else None

    def refilled(join):
        np.copyto(scratch, vectors[join.client_id])
        return torch.from_numpy(scratch) if torch else jax.numpy.array(scratch) if jax else scratch

    again = replay(server.log, made(log=True), refilled)
    scratch[:] = 7
    for one in (server, again):
        one.flush()
    assert bits(again.params) == bits(server.params)


def test_replay(rng):
    vectors = [awkward(rng, 50) for _ in range(10)]
    vectors[6][9] = -np.inf
    server = made(log=True)
    for turn in range(23):
        server.push(client=turn, update=vectors[turn % 10], version=server.version, loss=0.0, copy=turn % 2 == 1)
    again = replay(server.log, made(log=True), lambda join: vectors[join.client_id % 10])
    assert bits(again.params) == bits(server.params)
    assert (again.log, again.arrivals_waiting) == (server.log, 3)
    assert [entry.lent for entry in server.log[:4]] == [True, False] * 2


@pytest.mark.parametrize("inplace", [False, True])
def test_an_interrupt_after_the_sweep_leaves_nothing_of_what_is_rejected(inplace, monkeypatch):
    torch = pytest.importorskip("torch")
    server = Server(fedbuff(buffer_size=2), torch.nn.BatchNorm1d(3), inplace=inplace)
    bad, good = np.full(6, np.nan, np.float32), np.ones(6, np.float32)
    server.push(client=0, update=bad, version=0, buffers=np.full(7, 100.0), copy=False)
    make = LocalPlane.make

    def interrupted(plane, prepared, done, weights=None):
        make(plane, prepared, done, weights)
        if weights is not None:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(LocalPlane, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.push(client=1, update=good, version=0, buffers=np.full(7, 2.0), copy=False)
    assert server.flush() is None  # finishes the round
    pulled = server.pull()
    assert (pulled.version, pulled.buffers.tolist()) == (1, [2.0] * 7)
