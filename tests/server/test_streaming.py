"""accumulate=True: which rules can, that they give what buffered servers give within the derived bound, and that
nothing but an arrival that joins touches the sum.
"""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest

import bounds
import oracle
import presets
from afflux import AffluxError, Calibrate, Rule, Server, ops, replay
from afflux.ops import Step
from afflux.rules import RULES, fedasync, fedavg, fedbuff, twafl
from afflux.rules.presets.dialects import DIALECTS, nvflare
from afflux.rules.rule import Needs
from afflux.rules.staleness import Polynomial
from afflux.rules.weights import Uniform
from checked_out import D, vector
from conftest import ISAS, THREADS, awkward, bits, check_error, check_raises, push_all, same_state
from inside import slots_taken
from pairwise import soak
from stores import through_a_file
from variants import CLIENTS, SIZE, TYPES, VARIANTS, make, push, round_options, serve, state, trace

ROUNDS = 20
STREAMING = [variant for variant, (name, _) in VARIANTS.items() if not {variant, name} & presets.NOT_STREAMED.keys()]


def streaming(rule=None, **options):
    return Server(rule or fedbuff(buffer_size=3), vector(0.5), accumulate=True, **options)


def total(server):
    """The bits of the sum of those that wait."""
    return bits(server.state_dict()["arrays"]["total"])


def replica(server, **options):
    """A server with the state of this one."""
    other = Server(server.rule, np.zeros(server.pull().params.size), **options)
    other.load_state_dict(server.state_dict())
    return other


# ---- which rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_every_preset_streams_or_says_why_not(name):
    if name not in presets.NOT_STREAMED:
        assert Server(RULES[name](), vector(), accumulate=True).version == 0
        return
    reason = re.escape(presets.NOT_STREAMED[name])
    with pytest.raises(AffluxError, match=f"accumulate=True needs weights that are known on arrival; {reason}"):
        Server(RULES[name](), vector(), num_clients=CLIENTS, accumulate=True)


@pytest.mark.parametrize("dialect", [*DIALECTS, nvflare(per_version=True)])
def test_every_dialect_streams_or_says_why_not(dialect):
    """In the last one a weight depends on how many others pulled the same version."""
    rule = fedbuff(buffer_size=3, dialect=dialect)
    if not isinstance(dialect, str):
        check_error(r"fedbuff's come from VersionMeans\(.*\), which has no on_arrival", streaming, rule)
        return
    server, twin = streaming(rule), Server(rule, vector(0.5))
    for i in range(6):
        for each in (server, twin):
            each.push(client=i, **{each.rule.kind: vector(i)}, version=max(0, each.version - i % 2), num_examples=i + 1)
    assert server.version == 2
    assert np.all(np.abs(server.params - twin.params) <= np.spacing(np.abs(twin.params)))


class Remembers(Uniform):
    """Known on arrival, but for a memory."""

    needs = Needs(rule_vectors=("last",))


def test_memories_are_refused():
    rule = Rule("mine", "update", 2, Remembers(), Calibrate(False), lambda arrivals: Step("sgd"))
    check_error(r"mine replaces its rule vectors \(last\) by the vectors of a full buffer", streaming, rule)


# ---- the same result, within the bound -----------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [ROUNDS, *soak(60)])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("variant", STREAMING)
def test_every_round_against_the_oracle_and_a_buffered_server(variant, types, rounds):
    """From one state: the oracle's bounds hold, the report is the buffered one's, and the two agree within theirs."""
    name, options = VARIANTS[variant][0], round_options(variant)
    serving, dtype, kind = TYPES[types]
    server, apart = serve(variant, accumulate=True, **serving), 0.0
    for joins in trace(variant, rounds, 7):
        before, twin = state(server), replica(server, **serving)
        receipts, buffer = push(server, joins, kind)
        others, _ = push(twin, joins, kind)
        assert [r[:5] for r in receipts] == [r[:5] for r in others]
        same_reports(receipts[-1].report, others[-1].report)
        after, decisions = presets.ROUNDS[name](before, buffer, **options)
        now, buffered = state(server), state(twin)
        exact = bounds.allowed(name, before, buffer, after, decisions, dtype, **options)
        dv = bounds.streamed(buffer, decisions)
        close = bounds.allowed(name, before, buffer, after, decisions, dtype, dv=dv, **options)
        rounding = {key: bounds.rounded(np.zeros(SIZE), after[key], dtype) for key in exact}
        for key, bound in exact.items():
            assert np.all(np.abs(now[key] - after[key]) <= bound), key
            difference = np.abs(now[key] - buffered[key])
            assert np.all(difference <= close[key] + rounding[key]), (key, (difference / close[key]).max())
            apart = max(apart, difference.max())
    assert server.version == rounds
    if dtype == "float64" and server.rule.buffer_size > 1:
        assert apart > 0  # float32 rounding hides it
    assert server.arrivals_waiting == slots_taken(server) == 0


def same_reports(ours, theirs):
    for name in ("joins", "versions", "staleness", "weights", "norms"):
        assert bits(getattr(ours, name)) == bits(getattr(theirs, name)), name
    plain = [
        (r.version, r.client_ids, r.cosines, r.rejected, r.server_lr, r.scalars, r.stepped) for r in (ours, theirs)
    ]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("variant", ["fedbuff", "fedbuff-exponential", "fedavg", "twafl", "sasgd"])
def test_the_direction_itself(variant):
    """Params of zeros in float64, so that nothing but the direction's own roundings is seen."""
    server = serve(variant, np.zeros(SIZE), dtype="float64", accumulate=True)
    twin = serve(variant, np.zeros(SIZE), dtype="float64")
    for joins in trace(variant, 1, 5):
        before = state(server)
        _, buffer = push(server, joins, "float64")
        push(twin, joins, "float64")
        _, decisions = presets.ROUNDS[VARIANTS[variant][0]](before, buffer, **round_options(variant))
        lr = decisions["server_lr"]
        bound = lr * bounds.streamed(buffer, decisions) + 2 * oracle.EPS * np.abs(server.params)
        assert np.all(np.abs(server.params - twin.params) <= bound)


def test_permuted_arrivals_agree_within_the_bound():
    """Not bit by bit, as buffered servers do."""
    joins = next(iter(trace("fedbuff", 1, 3)))
    results = set()
    rng = np.random.default_rng(1)
    for _ in range(6):
        server = serve("fedbuff", np.zeros(SIZE), dtype="float64", accumulate=True)
        before = state(server)
        _, buffer = push(server, [joins[i] for i in rng.permutation(len(joins))], "float64")
        after, decisions = presets.ROUNDS["fedbuff"](before, buffer)
        bound = bounds.allowed("fedbuff", before, buffer, after, decisions, "float64")["params"]
        assert np.all(np.abs(server.params - after["params"]) <= bound)
        results.add(bits(server.params))
    assert len(results) > 1


def test_threads_instruction_sets_and_replays_give_the_same_bits(rng, isa_after):
    size = 140_001
    pool = [awkward(rng, size) for _ in range(6)]
    results, logs = set(), []

    def fresh(threads=1):
        return serve("fadas", pool[0], num_threads=threads, accumulate=True, log=True)

    for isa in ISAS:
        ops.choose_isa(isa)
        for threads in THREADS:
            server = fresh(threads)
            for i in range(17):
                version = max(0, server.version - i % 3)
                server.push(client=i % 6, update=pool[i % 6], version=version, num_examples=i + 1)
            results.add(bits(server.params) + total(server))
            logs.append(server.log)
    again = replay(logs[0], fresh(), lambda join: pool[join.client_id])
    assert results == {bits(again.params) + total(again)}


def test_models_with_buffers_of_their_own():
    """BatchNorm's statistics are few, and averaged as ever."""
    import torch

    model = torch.nn.BatchNorm1d(3)
    for rule in (fedbuff(buffer_size=2), fedasync()):
        servers = [Server(rule, model, accumulate=accumulate) for accumulate in (False, True)]
        for i in range(4):
            mine = {
                "running_mean": np.full(3, i),
                "running_var": np.full(3, i + 1.0),
                "num_batches_tracked": np.array(i),
            }
            for server in servers:
                server.push(client=i, **{server.rule.kind: np.full(6, 1.0 + i)}, version=0, buffers=mine)
        first, second = (server.pull() for server in servers)
        assert first.version == second.version > 0
        assert bits(first.buffers) == bits(second.buffers)
        assert not np.array_equal(first.buffers, servers[0].layout.flatten_buffers(model))


# ---- what a custom part has to keep --------------------------------------------------------------------------------


class Clipped:
    """CONTRIBUTING's example, known on arrival."""

    needs = Needs(norms=True)

    def __init__(self, raw=None, factor=None):
        self.raw, self.wrong_factor = raw, factor

    def __call__(self, arrivals):
        return np.array([min(1.0, 1.0 / norm) / len(arrivals) for norm in arrivals.norms])

    def on_arrival(self, staleness, num_examples, norm):
        return min(1.0, 1.0 / norm) if self.raw is None else self.raw

    def factor(self, arrivals):
        return 1.0 / len(arrivals) if self.wrong_factor is None else self.wrong_factor


def clipped(**wrong):
    return Rule("clipped", "update", 2, Clipped(**wrong), Calibrate(False), lambda arrivals: Step("sgd"))


def test_a_part_of_ones_own():
    server, twin = streaming(clipped()), Server(clipped(), vector(0.5))
    for each in (server, twin):
        push_all(each, range(4), lambda client: vector(client + 0.25), version=0)
    assert np.all(np.abs(server.params - twin.params) <= np.spacing(twin.params))
    assert server.version == 2


@pytest.mark.parametrize(
    ("wrong", "waiting", "message"),
    [
        ({"raw": 2.0}, 1, r"weigh gave client 0 the weight 0\.2.*, on_arrival and factor gave 2\.0 \* 0\.5"),
        ({"factor": 0.25}, 1, r"weigh gave client 0 the weight 0\.2"),
        ({"factor": 1e151}, 1, r"weigh's factor gave 1e\+151, must be a number of at most 1e\+150 in magnitude"),
        ({"raw": 1e151}, 0, r"weigh's on_arrival gave 1e\+151, must be a number of at most 1e\+150"),
        ({"raw": float("nan")}, 0, "weigh's on_arrival gave nan, must be a number"),
        # A comparison with a NumPy number rounds the other side to its type.
        *(({"raw": number("inf")}, 0, "weigh's on_arrival gave .*inf") for number in (float, np.float32, np.float16)),
        ({"factor": 0.5 + 1e-12}, 1, r"weigh gave client 0 the weight 0\.2"),
        ({"raw": "1"}, 0, "weigh's on_arrival gave '1', must be a number"),
    ],
)
def test_a_part_that_contradicts_itself(wrong, waiting, message):
    """The push that meets it fails without a trace."""
    server = streaming(clipped(**wrong))
    push_all(server, range(waiting), vector(), version=0)
    before = server.state_dict()
    check_error(r"\[clipped\] " + message, server.push, client=7, update=vector(), version=0)
    assert server.counts["refused"] == 1
    assert server.arrivals_waiting == waiting
    assert all(bits(array) == bits(before["arrays"][name]) for name, array in server.state_dict()["arrays"].items())
    assert slots_taken(server) == 0


@pytest.mark.parametrize(
    ("version", "message"), [(500, "the weights sum to 0"), (1500, r"weigh's factor gave .*e\+199")]
)
def test_an_exponential_law_divided_by_its_sum_counts_from_zero(version, message):
    """If all of a buffer is so stale that the sum is below 1e-150, a buffered server still computes the quotients."""
    rule = twafl(buffer_size=2, normalise="weights")
    server, twin = streaming(rule), Server(rule, vector(0.5))
    for each in (server, twin):
        old = each.state_dict()
        old["meta"]["version"] = 3000
        each.load_state_dict(old)
    for each in (server, twin):
        each.push(client=0, gradient=vector(), version=0)
    check_error(message, server.push, client=1, gradient=vector(), version=version)
    assert server.arrivals_waiting == 1
    for each in (server, twin):  # a fresh one decides
        each.push(client=1, gradient=vector(2.0), version=3000)
    assert bits(server.params) == bits(twin.params)


# ---- what touches the sum ------------------------------------------------------------------------------------------


def bad_pushes(server):
    """Whatever raises, or is decided against."""
    nan = vector()
    nan[2] = np.nan
    huge = np.full(D, 1e200)
    updates = [{"update": nan}, {"update": vector()[:4]}, {"update": huge}]
    for wrong in (*updates, {"version": 7}, {"client": 1.5}, {"num_examples": -1}):
        check_raises(AffluxError, server.push, **{"client": 9, "update": vector(), "version": 0, **wrong})
    assert server.push(client=1, update=vector(4.0), version=0).status == "rejected"


def test_what_does_not_join_leaves_the_sum_as_it_is():
    server = streaming(dtype="float64", duplicates="reject", max_abs=1e200)
    server.push(client=1, update=np.full(D, 0.1), version=0)
    before = total(server)
    bad_pushes(server)
    assert total(server) == before
    assert server.counts["refused"] == 6
    assert server.arrivals_waiting == 1
    assert slots_taken(server) == 0
    check_error("client 9's update has norm inf: sums", server.push, client=9, update=np.full(D, 1e200), version=0)


def test_faults_and_staleness_bound():
    server = streaming(fedbuff(buffer_size=2), faults="record", max_staleness=0)
    push_all(server, (0, 1, 2), vector(), version=lambda client: 0 if client < 2 else 1)
    before = total(server)
    assert server.push(client=3, update=vector(np.inf), version=1).status == "faulty"
    assert server.push(client=4, update=vector(), version=0).status == "dropped"
    assert total(server) == before


def test_a_flush_is_a_short_round_and_a_discard_forgets():
    rule = fedbuff(buffer_size=3)
    server, twin = streaming(rule), Server(replace(rule, buffer_size=2), vector(0.5))
    for each in (server, twin):
        each.push(client=0, update=vector(1.0), version=0)
        report = each.push(client=1, update=vector(2.0), version=0).report
    assert server.flush().weights.tolist() == report.weights.tolist()
    assert bits(server.params) == bits(twin.params)
    assert server.flush() is None
    server.push(client=0, update=vector(1e14), version=1)
    assert server.discard() == 1
    assert "total" not in server.state_dict()["arrays"]
    push_all(server, range(3), vector(3.0), version=1)
    assert np.array_equal(server.params, twin.params + np.float32(3.0))


def test_pulls_in_place_and_other_options():
    server = streaming(fedbuff(buffer_size=2), inplace=True, slot_dtype="bfloat16")
    push_all(server, range(4), vector(1.0))
    assert server.pull().params.tolist() == [2.5] * D


# ---- saved states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [v for v in STREAMING if make(v).buffer_size > 1])
def test_a_state_in_the_middle_of_a_buffer(variant):
    """It goes on with the same bits, here and in another server, and holds one sum in place of the vectors."""
    server, straight = (serve(variant, accumulate=True, log=True) for _ in range(2))
    joins = [join for one in trace(variant, 8, 10) for join in one]
    for count, join in enumerate(joins):
        push(straight, [join])
        push(server, [join])
        if count == 22:
            saved = through_a_file(server.state_dict())
            assert (saved["meta"]["filled"], saved["meta"]["added"]) == (3, 3)
            assert (saved["arrays"]["slots"].shape, saved["arrays"]["total"].shape) == ((0, SIZE), (SIZE,))
            server = serve(variant, np.full(SIZE, 7.0), accumulate=True, log=True)
            server.load_state_dict(saved)
            saved["arrays"]["total"][:] = 0  # it was copied
    same_state(server.state_dict(), straight.state_dict())


def test_a_buffered_state_is_taken_over_and_not_the_other_way():
    """Vectors that wait are added; a sum cannot be taken apart."""
    rule = fedavg(buffer_size=4)
    buffered = Server(rule, vector(0.5))
    push_all(buffered, range(3), lambda client: vector(client + 1.0), version=0, num_examples=lambda client: client + 1)
    server, straight = streaming(rule), streaming(rule)
    server.load_state_dict(buffered.state_dict())
    push_all(straight, range(3), lambda client: vector(client + 1.0), version=0, num_examples=lambda client: client + 1)
    assert total(server) == total(straight)
    for each in (server, straight):
        each.push(client=3, update=vector(9.0), version=0)
    assert bits(server.params) == bits(straight.params)
    assert slots_taken(server) == 0
    server.push(client=0, update=vector(), version=1)
    before = buffered.state_dict()
    check_error(r"\[load_state_dict\] 1 arrivals wait as one sum", buffered.load_state_dict, server.state_dict())
    assert buffered.state_dict()["meta"] == before["meta"]
    server.discard()
    buffered.load_state_dict(server.state_dict())
    assert buffered.version == 1


def test_a_buffered_state_needs_one_slot_however_many_wait():
    buffered = Server(fedbuff(buffer_size=40), vector(0.5))
    push_all(buffered, range(39), lambda client: vector(client + 1.0), version=0)
    server = streaming(fedbuff(buffer_size=40), max_slots=1)
    server.load_state_dict(buffered.state_dict())
    for each in (buffered, server):
        each.push(client=39, update=vector(9.0), version=0)
    assert bits(server.params) == bits(buffered.params)  # integers: their sums are exact in any order


def test_a_buffered_state_with_vectors_too_large_for_a_sum_is_refused():
    buffered = Server(fedbuff(buffer_size=4), vector(0.5).astype(np.float64), dtype="float64", max_abs=1e200)
    buffered.push(client=1, update=np.full(D, 1e200), version=0)
    server = Server(fedbuff(buffer_size=4), vector(0.5).astype(np.float64), dtype="float64", accumulate=True)
    check_error("client 1 waits with the norm .*, too large for a sum", server.load_state_dict, buffered.state_dict())
    assert slots_taken(server) == 0


def test_a_sum_is_not_taken_over_by_another_law():
    server = streaming(fedbuff(buffer_size=4))
    server.push(client=1, update=vector(), version=0)
    server.flush()
    server.push(client=2, update=vector(), version=0)  # of staleness 1
    other = streaming(fedbuff(buffer_size=4, staleness=Polynomial(2.0)))
    check_error(r"client 2 is in .* weight 0\.7.*gives it 0\.25: save", other.load_state_dict, server.state_dict())
    assert other.version == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["meta"].update(added=3), "3 arrivals are in the total, 2 in the buffer"),
        (lambda s: s["meta"].update(added=-1), "-1 is not a count"),
        (lambda s: s["meta"].update(added=1), r"slots is float32 of shape \(0, 5\), expected float32 of shape \(1, 5"),
        (lambda s: s["meta"].update(raw=[1.0]), "1 raw weights belong to 2 arrivals in the total"),
        (lambda s: s["meta"].update(raw=[1.0, 0.5]), r"client 2 is in the sum with .* weight 0\.5, .* gives it 1\.0"),
        (lambda s: s["meta"]["waiting"][1].__setitem__(-1, 3), "arrival 1 has staleness 3 and version 0, at version 0"),
        (lambda s: s["arrays"].pop("total"), "the state is damaged: KeyError: 'total'"),
        (lambda s: s["arrays"].update(total=np.zeros(4)), r"total is float64 of shape \(4,\)"),
        (lambda s: s["arrays"].update(total=np.full(5, np.inf)), "total has a non-finite value"),
    ],
)
def test_a_damaged_state_changes_nothing(damage, message):
    server = streaming()
    server.push(client=1, update=vector(), version=0)
    server.push(client=2, update=vector(), version=0)
    wrong, before = copy.deepcopy(server.state_dict()), total(server)
    damage(wrong)
    check_error(message, server.load_state_dict, wrong)
    assert total(server) == before
