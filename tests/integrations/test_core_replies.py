"""Replies: which of them join, and which are the fault of their client."""

import signal
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import inf, nan

import numpy as np
import pytest

from afflux import Join, Layout, Server
from afflux.integrations._core import Trained, TrainingRun
from afflux.integrations._server import weighs_by_examples
from afflux.integrations._settings import RunSettings
from afflux.ops.validation import brief
from afflux.rules import ca2fl, fedavg, fedbuff, gsgm
from afflux.rules.rule import Needs
from afflux.rules.weights import Given
from conftest import check_error
from core_runs import MODEL, OutOfMemory, replied, run_of, trained
from hostile import Raises
from pairwise import soak


@pytest.mark.parametrize(
    "error", [MemoryError("s_push: parser stack overflow"), RecursionError("too deep"), OSError("no file"), KeyError(1)]
)
def test_whatever_the_bytes_of_a_client_raise_is_its_fault(error):
    run = run_of()
    receipt = replied(run, "ann", OutOfMemory(error))
    assert receipt.status == "faulty"
    assert type(error).__name__ in receipt.reason
    assert run.server.faults[0].client_id == "ann"
    assert run.server.tasks == ()


@pytest.mark.parametrize("facts", [{}, {"num_examples": 3, "loss": 0.5, "local_steps": 2}])
def test_a_sound_reply_raises_no_error_within(facts, monkeypatch):
    """An error that is caught costs the look at the handlers of all signals: 100 us, twice the whole reply."""
    monkeypatch.setattr(signal, "getsignal", lambda number: pytest.fail("an error was caught"))
    run = run_of()
    for address in "ab":
        assert replied(run, address, lambda: trained(**facts)).status == "joined"
    assert run.server.version == 1


class RaisingArray(np.ndarray):
    """An array whose shape raises, outside of what the server takes for the client's fault."""

    @property
    def shape(self):
        raise MemoryError("made up")


class RaisingMapping(dict):
    def keys(self):
        raise MemoryError("made up")

    __iter__ = __len__ = items = keys


class NoText(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


def of_subclass():
    return Trained({**MODEL, "w": MODEL["w"].view(RaisingArray)})


def of_a_mapping():
    return Trained(RaisingMapping(MODEL))


@pytest.mark.parametrize("read", [of_subclass, of_a_mapping, OutOfMemory(NoText())])
def test_an_error_of_a_reply_itself_is_the_clients_fault(read):
    run = run_of()
    assert replied(run, "ann", read).status == "faulty"
    assert run.server.tasks == ()


@pytest.mark.parametrize("arrays", [lambda: Raises(MemoryError), lambda: None, *soak(lambda: [MODEL["w"]])])
def test_a_reply_without_arrays_by_name_is_the_clients_fault(arrays):
    run = run_of()
    receipt = replied(run, "ann", lambda: Trained(arrays()))
    assert receipt.status == "faulty"
    assert "must be arrays by name" in receipt.reason
    assert run.server.tasks == ()


def test_facts_come_from_what_a_client_reports():
    """Those that the server lists; others, and what is no finite number, count as unknown."""
    rule = replace(fedbuff(buffer_size=3), weigh=Given("quality"))
    run = run_of(rule, server_options={"facts": ("tokens", "steps"), "log": True})
    reports = ({"quality": np.float32(0.5), "tokens": 7, "other": 1.0}, {"quality": 2, "tokens": "8", "steps": inf})
    replies = zip((*reports, {"quality": None}, None), (3, 0, "x", None), strict=True)
    for client, (facts, steps) in enumerate(replies):
        run.sent(str(client), run.assign(client))
        receipt = run.receive(str(client), partial(trained, facts=facts, local_steps=steps))
        assert receipt.status == ("joined" if client < 2 else "faulty")
    assert "lack 'quality', by which fedbuff weighs" in receipt.reason
    joins = [(entry.facts, entry.local_steps) for entry in run.server.log if isinstance(entry, Join)]
    assert joins == [((("quality", 0.5), ("tokens", 7.0)), 3), ((("quality", 2.0),), 0)]


def test_a_key_of_another_type_is_unknown():
    run = run_of()
    run.sent("a", run.assign("ann"))
    for key in (["a"], {}, None):
        assert run.receive(key, trained) is None
    assert run.lost["unknown"] == 3
    assert run.receive("a", trained).status == "joined"


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"), [("int32", 1e11), ("bool", 5.0), ("uint8", -3.0), ("int64", 1e19), ("float16", 1e10)]
)
def test_values_that_the_models_dtype_cannot_hold_are_refused(dtype, value, delta):
    model = {"w": np.zeros(3, np.float32), "n": np.zeros(2, dtype), "scalar": np.zeros((), "int16")}
    run = TrainingRun(fedbuff(buffer_size=2), model, RunSettings(roles={"n": "statistic"}), num_clients=4)
    for client, n, status in ((1, value, "faulty"), (2, 1.0, "joined"), (3, 1.0, "joined")):
        assert replied(run, client, partial(Trained, {**model, "n": np.full(2, n)}, delta=delta)).status == status
    made = run.versions.of(run.server.pull())
    assert made["n"].dtype == dtype
    assert made["n"].tolist() == [1, 1]


def test_a_store_with_values_that_a_dtype_cannot_hold_opens(tmp_path):
    model = {"w": np.zeros(3, np.float16), "n": np.zeros(2, np.int32)}
    layout = Layout.of(model, roles={"n": "statistic"})
    server = Server(fedbuff(buffer_size=1), model, layout=layout, store=tmp_path / "store", faults="record")
    server.push(client=1, version=server.pull(), model={"w": np.full(3, -1e10), "n": np.full(2, 1e11)})
    server.close()
    run = TrainingRun(fedbuff(buffer_size=1), model, RunSettings(store=tmp_path / "store"), num_clients=4)
    made = run.versions.of(run.server.pull())
    assert made["w"].tolist() == [-65504.0] * 3
    assert made["n"].tolist() == [2**31 - 1] * 2
    run.close()


@pytest.mark.parametrize("facts", [{"client_lr": 0.0}, {"client_lr": "a"}, {"local_steps": -1}])
def test_rates_that_the_rule_does_not_need_are_not_read(facts):
    for rule, status in ((fedbuff(buffer_size=2), "joined"), (gsgm(buffer_size=2), "faulty")):
        run = run_of(rule, client_lr=0.1, local_steps=1)
        assert replied(run, 1, lambda: trained(**facts)).status == status


def test_a_reply_without_examples_is_faulty_where_the_rule_weighs_by_them():
    assert not weighs_by_examples(replace(fedavg(buffer_size=1), weigh=Given("quality")))
    for rule, weighs in ((fedavg(buffer_size=1), True), (fedbuff(buffer_size=1), False), (ca2fl(buffer_size=1), False)):
        assert weighs_by_examples(rule) is weighs
        run = run_of(rule)
        receipt = replied(run, 1)
        assert receipt.status == ("faulty" if weighs else "joined")
        assert ("lacks its number of examples" in receipt.reason) is weighs


@pytest.mark.parametrize("weights", [(0.25, 1, np.float32(0.75)), *soak((2.5, np.array(4.25), 3))])
def test_weights_with_a_fraction_are_those_of_a_rule_that_weighs_by_examples(weights):
    whole = [int(4 * weight) for weight in weights]
    for rule, by_examples in ((fedavg(buffer_size=3), True), (fedbuff(buffer_size=3), False)):
        runs = []
        for numbers in (weights, whole):
            run = run_of(rule)
            for client, number in enumerate(numbers):
                assert replied(run, client, partial(trained, client, num_examples=number)).status == "joined"
            runs.append(run)
        first, second = (run.report.weights.tolist() for run in runs)
        assert first == second
        assert (len(set(first)) > 1) is by_examples
        assert runs[0].server.params.tobytes() == runs[1].server.params.tobytes()


def test_a_fraction_counts_only_as_the_number_of_examples():
    """Not a metric of the same name; and a store's server that counts whole numbers refuses fractions."""
    run = run_of(fedavg(buffer_size=2))
    for client, facts in ((1, {"num_examples": 0.5}), (2, {})):
        replied(run, client, partial(trained, num_examples=1, facts=facts))
    assert run.report.weights.tolist() == [0.5, 0.5]
    for number in (-0.25, nan, np.float32("inf"), "0.25", 1e-320):
        receipt = replied(run, 1, partial(trained, num_examples=number))
        assert receipt.status == "faulty"
        if number != 1e-320:
            assert f"its number of examples is {brief(number)}, must be a finite number of at least 0" in receipt.reason


def test_a_store_of_a_server_that_counts_whole_numbers_takes_no_fractions(tmp_path):
    Server(fedavg(buffer_size=1), MODEL, store=tmp_path / "store", faults="record").close()
    with closing(run_of(fedavg(buffer_size=1), store=tmp_path / "store")) as run:
        receipt = replied(run, 1, partial(trained, num_examples=0.5))
        assert receipt.status == "faulty"
        assert "its number of examples is 0.5, and the store's server counts whole numbers" in receipt.reason


def test_a_rule_of_ones_own_says_that_it_weighs_by_examples():
    def weigh(arrivals):
        return arrivals.num_examples / 10

    rule = replace(fedavg(buffer_size=1), weigh=weigh)
    assert not weighs_by_examples(rule)  # nothing says so
    weigh.needs = Needs(examples=True)
    assert weighs_by_examples(rule)


ROLES = {"mask": "constant", "n": "local", "key": "copied", "mean": "statistic"}


def with_roles():
    """A model of arrays in every role, without names that say so."""
    return {
        "w": np.zeros(2, np.float32),
        "mean": np.zeros(2),
        "mask": np.array([0.0, -np.inf], np.float32),
        "key": np.array([2**62 + 1, 5]),
        "n": np.array([7]),
    }


@pytest.mark.parametrize("delta", [False, True])
def test_replies_of_models_with_roles(delta, tmp_path):
    """What goes out has all names; a difference of a constant is refused, that of a copied array is added."""
    settings = RunSettings(roles=ROLES, store=tmp_path / "store")
    run = TrainingRun(fedbuff(buffer_size=1), with_roles(), settings, num_clients=4)
    sent = run.versions.of(run.server.pull())
    assert list(sent) == list(with_roles())
    for name, array in with_roles().items():
        assert (sent[name].dtype, sent[name].tolist()) == (array.dtype, array.tolist())
    reply = {"w": np.ones(2, np.float32), "mean": np.ones(2), "mask": sent["mask"], "key": np.array([2**62 + 3, 4])}
    if delta:
        with np.errstate(invalid="ignore"):
            reply = {name: array - with_roles()[name] for name, array in reply.items()}
    bad = reply | {"mask": np.array([1.0, -np.inf])}
    for client, arrays, status in ((1, bad, "faulty"), (2, reply, "joined")):
        receipt = replied(run, client, partial(Trained, arrays, delta=delta))
        assert receipt.status == status
        assert ("mask" in receipt.reason) is (status == "faulty")
    made = run.versions.copied(run.server.pull())
    assert (made["w"].tolist(), made["mean"].tolist(), made["n"].tolist()) == ([1, 1], [1, 1], [7])
    assert (made["key"].tolist(), made["mask"].tolist()) == ([2**62 + 3, 4], [0.0, -np.inf])
    run.close({})
    again = TrainingRun(fedbuff(buffer_size=1), with_roles(), settings, num_clients=4)
    assert again.server.layout.roles["n"] == "local"
    again.close()


def test_wrong_roles_are_refused():
    check_error(r"roles is \['w'\], must be ", RunSettings, roles=["w"])
    check_error("roles has 'v'", TrainingRun, fedbuff(), with_roles(), RunSettings(roles={"v": "local"}), num_clients=4)
