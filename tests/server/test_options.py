"""ServerOptions: one checked set for Server, plan and the store."""

import re
from dataclasses import FrozenInstanceError, asdict, fields, replace
from functools import partial
from itertools import combinations, product
from typing import get_type_hints

import numpy as np
import pytest

from afflux import AffluxError, Rule, Server, ServerOptions, plan, replay
from afflux.aggregation.options import STORED_OPTIONS, Options
from afflux.ops.errors import StoreError
from afflux.rules import ca2fl, fedasync, fedavg, fedbuff, gsgm, wkafl
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from conftest import ROOT, bits, check_error, push_all, raising
from own_parts import Says
from pairwise import cover, soak_all


def test_the_keyword_arguments_are_the_fields():
    hints = get_type_hints(ServerOptions)
    assert get_type_hints(Options) == {field.name: hints[field.name] for field in fields(ServerOptions)}
    assert set(STORED_OPTIONS) < set(asdict(ServerOptions()))


@pytest.mark.parametrize("page", ["server", "store"])
def test_the_tables_of_the_pages_have_all_options(page):
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    assert {field.name for field in fields(ServerOptions)} <= set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_keyword_arguments_take_the_place_of_options():
    options = ServerOptions(num_clients=5, max_staleness=3, log=True)
    server = Server(ca2fl(buffer_size=2), np.zeros(3), options, max_staleness=4)
    assert server.options == replace(options, max_staleness=4, duplicates="latest")
    with pytest.raises(FrozenInstanceError):
        options.log = False


def fresh_only(most):
    """A rule that needs arrivals of at most this staleness."""
    return Rule("fresh", "update", 1, Says(np.ones(1), max_staleness=most), NONE, Sgd(1.0))


@pytest.mark.parametrize(("needed", "option", "most"), [(2, None, 2), (2, 3, 2), (2, 1, 1), (0, None, 0)])
def test_a_rule_may_need_a_limit_of_staleness(needed, option, most, tmp_path):
    """As by the option, also in a store that is opened again, and in a replay."""
    server = Server(fresh_only(needed), np.zeros(2), max_staleness=option, log=True, store=tmp_path / "store")
    other = Server(fresh_only(None), np.zeros(2), max_staleness=most, log=True)
    for number in range(5):
        statuses = [each.push(client=number, version=0, update=np.ones(2)).status for each in (server, other)]
        assert statuses == (["joined"] if number <= most else ["dropped"]) * 2
    assert server.log == other.log
    fresh = Server(fresh_only(needed), np.zeros(2), max_staleness=option, log=True)
    again = replay(server.log, fresh, lambda join: np.ones(2))
    assert bits(again.params) == bits(server.params) == bits(other.params)
    server.close()
    with Server.open(tmp_path / "store", fresh_only(needed)) as opened:
        assert opened.push(client=9, version=0, update=np.ones(2)).status == "dropped"
        check_error("max_staleness is", opened.replace_rule, fresh_only(needed + 1))


def test_a_rule_that_needs_a_limit_of_staleness_takes_no_state_with_older_arrivals(tmp_path):
    rules = [replace(fresh_only(most), buffer_size=2) for most in (None, 1, 2)]
    older = Server(rules[0], np.zeros(2), first_version=5, store=tmp_path / "store")
    older.push(client=1, staleness=2, update=np.ones(2))
    state = older.state_dict()
    older.close()
    server, enough = (Server(rule, np.zeros(2), first_version=5) for rule in rules[1:])
    message = "arrival 0 has staleness 2, fresh needs at most 1"
    check_error(message, server.load_state_dict, state)
    check_error(message, Server.open, tmp_path / "store", rules[1], error=StoreError)
    enough.load_state_dict(state)
    assert enough.arrivals_waiting == 1


@pytest.mark.parametrize("most", [-1, 1.5, True, "2"])
def test_a_wrong_limit_of_staleness_is_no_rules(most):
    check_error("needs.max_staleness is", fresh_only, most)


@pytest.mark.parametrize("options", [{}, {"log": True}, 0, fedbuff()])
def test_options_of_another_type_are_refused(options):
    for call in (lambda: Server(fedbuff(), np.zeros(3), options), lambda: plan(fedbuff(), 3, options)):
        check_error(r"options is .*, must be a ServerOptions", call)


BUDGETS, SECONDS = (0, -5, 1e-9, "1 GB"), (0, -1.0, np.inf, np.nan, "10", True)
CACHES_ROWS = "clip_norms: ca2fl caches rows, and a factor on the weight does not bound a row: use max_norm"


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (ca2fl(), {}, "ca2fl caches a row per client: give num_clients"),
        (ca2fl(), {"num_clients": 10.5}, "num_clients is 10.5, must be an int"),
        (gsgm(), {}, "gsgm takes every client once per pass: give num_clients"),
        (fedbuff(), {"num_clients": 0}, "num_clients is 0"),
        (fedbuff(buffer_size=5), {"num_clients": 3, "duplicates": "reject"}, "buffer_size 5 exceeds num_clients 3"),
        (fedbuff(), {"duplicates": "newest"}, "duplicates is 'newest', must be 'latest', 'both' or 'reject'"),
        (fedbuff(), {"slot_dtype": "float64"}, "slot_dtype is 'float64', must be 'float32' or 'bfloat16'"),
        (fedbuff(), {"accumulate": "stream"}, "accumulate is 'stream', must be True or False"),
        (ca2fl(), {"num_clients": 3, "accumulate": True}, "accumulate=True needs weights that are known on arrival"),
        (wkafl(), {"accumulate": True}, "inner products of a full buffer"),
        (fedbuff(), {"accumulate": True, "duplicates": "latest"}, "duplicates='latest' replaces arrivals"),
        (fedbuff(buffer_size=5), {"max_slots": 4}, "max_slots is 4, must be an int of at least 5"),
        (gsgm(), {"num_clients": 9, "max_slots": 9}, "max_slots is 9, must be an int of at least 10"),
        (fedbuff(), {"accumulate": True, "max_slots": 0}, "max_slots is 0, must be an int of at least 1"),
        (fedbuff(), {"max_staleness": -1}, "max_staleness is -1, must be an int of at least 0"),
        (fedbuff(), {"max_versions": 1}, "max_versions is 1, must be an int of at least 2"),
        (fedbuff(), {"max_abs": 0}, r"max_abs is 0, must be positive and at most 1e\+30"),
        (fedbuff(), {"max_abs": np.nan}, "max_abs is nan"),
        (fedbuff(), {"max_abs": 1e31}, r"max_abs is 1e\+31, must be positive and at most 1e\+30"),
        (fedbuff(), {"max_abs": 1e301, "dtype": "float64"}, r"must be positive and at most 1e\+300"),
        (fedbuff(), {"max_abs": "1"}, "max_abs is '1', must be a number"),
        (fedbuff(), {"max_norm": -1.0}, "max_norm is -1.0, must be finite and positive"),
        (fedbuff(), {"clip_norms": 0}, "clip_norms is 0, must be finite and positive"),
        (fedbuff(), {"clip_norms": np.nan}, "clip_norms is nan"),
        (fedbuff(), {"clip_norms": "auto"}, "clip_norms is 'auto', must be a number"),
        (ca2fl(), {"clip_norms": 10, "num_clients": 100}, CACHES_ROWS),
        (fedasync(), {"clip_norms": 10}, "clip_norms: fedasync takes models"),
        (fedavg(), {"clip_norms": 10, "accumulate": True}, "clip_norms: accumulate=True adds an arrival up before"),
        (fedbuff(), {"commit_every": 2}, "commit_every: without a store nothing is committed"),
        (fedbuff(), {"durability": "power"}, "durability: without a store nothing is committed"),
        (fedbuff(), {"durability": "process"}, "durability: without a store nothing is committed"),
        (fedbuff(), {"rows_on": "host"}, "rows_on is 'host', but params is on the CPU"),
        (fedbuff(), {"rounds": "full "}, "rounds is 'full ', must be 'full' or 'flush'"),
        (fedbuff(), {"rounds": "flush", "flush_after": 1.0}, "flush_after: with rounds='flush' only flush"),
        *[(fedbuff(), {"flush_after": seconds}, "flush_after is .*, must be") for seconds in SECONDS],
        (fedbuff(), {"seed": -1}, "seed is -1, must be an int of at least 0"),
        (fedbuff(), {"seed": 2**64}, "seed is 18446744073709551616, must be less than"),
        (fedbuff(), {"memory_budget": 1}, "memory_budget is 1 B, but"),
        (gsgm(), {"num_clients": 12, "memory_budget": 9}, "memory_budget is 9 B, but .* may be needed"),
        *[
            (fedbuff(), {"memory_budget": size}, "memory_budget is .*, must be an int of at least 1")
            for size in BUDGETS
        ],
    ],
)
def test_server_and_plan_refuse_the_same(rule, options, message):
    check_error(rf"^\[Server\] .*{message}", Server, rule, np.zeros(3), **options)
    check_error(message, plan, rule, 3, **options)


def test_an_unknown_option_is_no_option():
    for op, call in (
        ("Server", lambda **own: Server(fedbuff(), np.zeros(3), **own)),
        ("plan", partial(plan, fedbuff(), 3)),
    ):
        check_error(rf"^\[{op}\] 'max_stalenes' is no option; did you mean 'max_staleness' or ", call, max_stalenes=3)


def test_a_plan_keeps_the_budget_of_its_server():
    free = plan(fedbuff(buffer_size=4), 1000)
    budget = plan(fedbuff(buffer_size=4), 1000, max_slots=4).memory_bytes
    assert plan(fedbuff(buffer_size=4), 1000, memory_budget=budget).memory_bytes <= budget < free.memory_bytes


def test_an_opened_server_has_the_options_of_its_store(tmp_path, caplog):
    given = {"max_staleness": 7, "durability": "power", "commit_every": 3, "log": True}
    with Server(fedbuff(buffer_size=2), np.zeros(3), store=tmp_path / "store", num_clients=9, **given) as server:
        first = replace(server.options, num_clients=None)  # the rule does not need it
    stored = {name: getattr(first, name) for name in STORED_OPTIONS}
    defaults = {"slot_dtype": None, "duplicates": None, "rows_on": "device", "inplace": False, "memory_budget": None}
    for options in ({}, given, stored, stored | defaults):
        with Server.open(tmp_path / "store", **options) as server:
            assert replace(server.options, slot_dtype=None) == first
    assert not caplog.messages


#: Other values of the options that `open` replaces.
REPLACED = {"durability": "power", "commit_every": 2, "max_staleness": 3, "faults": "record", "max_slots": 5}
REPLACED |= {"max_versions": 4, "flush_after": 9.0, "max_abs": 10.0, "max_norm": 1.0, "clip_norms": 3.0}


def test_an_open_that_fails_says_of_no_option_that_it_changes(tmp_path, caplog, monkeypatch):
    with Server(fedbuff(buffer_size=2), np.zeros(3), store=tmp_path / "store") as server:
        pushed(server, arrivals=5)
    with monkeypatch.context() as broken:
        broken.setattr("afflux.server.persistence.arrivals_of", raising(AffluxError, "by a test"))
        check_error("by a test", Server.open, tmp_path / "store", max_norm=1.0)
    assert caplog.messages == []
    with Server.open(tmp_path / "store") as server:
        assert server.options.max_norm is None


def test_open_replaces_limits_and_says_from_which_version_on(tmp_path, caplog):
    with Server(fedbuff(buffer_size=2), np.zeros(3), store=tmp_path / "store", max_norm=50.0) as server:
        pushed(server, arrivals=5)
    for change in (REPLACED, {}):  # the second time they are stored
        with Server.open(tmp_path / "store", **change) as server:
            assert {name: getattr(server.options, name) for name in REPLACED} == REPLACED
            assert "max_norm is 1" in server.push(client=3, version=2, update=np.ones(3)).reason
    lines = [line for line in caplog.messages if line.startswith("[open]")]
    (line,) = lines
    assert f"{tmp_path / 'store'}: from version 2 on, " in line
    for name, value in REPLACED.items():
        assert f"{name} is {value!r}, not " in line
    assert "max_norm is 1.0, not 50.0" in line
    with Server.open(tmp_path / "store", max_norm=None, memory_budget=1 << 20) as server:
        assert server.options.max_norm is None
        assert server.options.max_slots > 5
        assert server.push(client=3, version=2, update=np.full(3, 0.5)).status == "joined"


#: Other values of the options that it does not.
UNCHANGED = {"num_clients": 5, "dtype": "float64", "slot_dtype": "bfloat16", "duplicates": "both", "accumulate": True}
UNCHANGED |= {"seed": 3, "log": False, "clip_norms": 3.0, "facts": ("tokens",), "rounds": "flush", "inplace": True}
UNCHANGED |= {"rows_on": "host"}


@pytest.mark.parametrize(("option", "value"), UNCHANGED.items())
def test_an_option_that_cannot_change_is_an_error_with_both_values(option, value, tmp_path, caplog):
    rule = ca2fl(buffer_size=2) if option in ("num_clients", "duplicates") else fedbuff(buffer_size=2)
    Server(rule, np.zeros(3), store=tmp_path / "store", num_clients=4, log=True).close()
    with pytest.raises(AffluxError, match=rf"^\[open\] {option} is {re.escape(repr(value))}, and .* in the store: "):
        Server.open(tmp_path / "store", max_norm=1.0, **{option: value})
    with Server.open(tmp_path / "store") as server:
        assert server.options.max_norm is None
    assert not caplog.messages


def test_a_subclass_may_be_opened(tmp_path):
    class Mine(Server):
        def __init__(self, rule, params, **more):
            super().__init__(rule, params, **more)

    Mine(fedbuff(buffer_size=2), np.zeros(3), store=tmp_path / "store").close()
    with Mine.open(tmp_path / "store") as server:
        assert isinstance(server, Mine)


def said(call):
    """The message of the error that a call raises, without the name of the operation; None without an error."""
    try:
        call()
    except AffluxError as error:
        return str(error).partition("] ")[2]
    return None


def pushed(server, arrivals=6):
    push_all(server, (client % 2 for client in range(arrivals)), np.ones(3))


#: Values of the options that a store keeps and that can be combined with each other.
STORED_VALUES = {"max_versions": [None, 2, 3], "max_slots": [None, 2], "accumulate": [False, True]}
#: Options of `Server.open`.
CHANGES = [{"commit_every": 2}, {"commit_every": None, "durability": "power"}, {"commit_every": 1}]


@pytest.mark.parametrize(
    "values", [*cover(*STORED_VALUES.values()), *soak_all((row,) for row in product(*STORED_VALUES.values()))]
)
def test_open_checks_options_as_the_constructor_does(values, tmp_path):
    stored, rule = dict(zip(STORED_VALUES, values, strict=True)), fedbuff(buffer_size=2)
    Server(rule, np.zeros(3), store=tmp_path / "store", **stored).close()

    def opened(changes):
        with Server.open(tmp_path / "store", **changes) as server:
            pushed(server)

    for changes in CHANGES:
        expected = said(lambda own=stored | changes: plan(rule, 3, store=True, **own))
        assert said(partial(opened, changes)) == expected


#: Values of each option, beside its default.
VALUES = {"num_clients": [2, 9], "dtype": ["float64"], "slot_dtype": ["bfloat16", "float64"], "seed": [7]}
VALUES |= {"duplicates": ["latest", "both", "reject"], "max_staleness": [0], "faults": ["record"], "max_slots": [1, 2]}
VALUES |= {"max_versions": [2, 3], "inplace": [True], "log": [True], "accumulate": [True], "flush_after": [1e6]}
VALUES |= {"max_abs": [1e3], "max_norm": [1e3], "clip_norms": [2.0], "durability": ["power"], "commit_every": [None, 2]}
VALUES |= {"memory_budget": [100, 10**6], "rows_on": ["host"], "facts": [("tokens",)], "rounds": ["flush"]}
VALUES |= {"store": [True]}  # which `plan` takes
PAIRS = [
    {**one, **other}
    for a, b in combinations(VALUES, 2)
    for one, other in product(({a: value} for value in VALUES[a]), ({b: value} for value in VALUES[b]))
]


@pytest.mark.parametrize(
    ("preset", "stored"), [(fedbuff, False), *soak_all([(fedbuff, True), *product([ca2fl, gsgm], [False, True])])]
)
def test_every_pair_of_options_is_refused_or_works(preset, stored, tmp_path):
    """By `plan` in the same words as by a server."""
    rule = preset(buffer_size=2)
    assert VALUES.keys() - {"store"} == get_type_hints(ServerOptions).keys()
    for number, pair in enumerate(PAIRS):
        options = ({} if rule.name == "fedbuff" else {"num_clients": 3}) | {"store": stored} | pair
        planned = said(partial(plan, rule, 3, **options))
        options["store"] = tmp_path / f"{number}" if options["store"] else None
        if planned is not None:
            check_error(re.escape(planned), Server, rule, np.zeros(3), **options)
            continue
        with Server(rule, np.zeros(3), **options) as server:  # closes the store
            pushed(server, 2 if server.options.rounds == "flush" else 4)
            if server.options.rounds == "flush":
                server.flush()
            assert server.version >= 1, options
