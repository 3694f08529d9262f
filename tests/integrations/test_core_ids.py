"""Ids of clients: their addresses, what a function makes of these, or what replies say."""

import pytest

from afflux import Server
from afflux.integrations._core import Trained
from afflux.rules import afa_cs, ca2fl, dp_fedbuff, fedasync, gsgm, mf_ca2fl
from conftest import check_error
from core_runs import one_round, replied, run_of, trained

ROWS = [lambda: ca2fl(buffer_size=2), lambda: mf_ca2fl(buffer_size=2), lambda: afa_cs(buffer_size=2)]


@pytest.mark.parametrize("rule", ROWS)
def test_a_store_with_rows_needs_clients_that_it_knows(tmp_path, rule):
    store = tmp_path / "store"
    rates = {"client_lr": 0.1, "local_steps": 1}
    run = run_of(rule(), store=store, **rates)
    one_round(run, [11, 12])
    run.close({})
    again = run_of(rule(), store=store, **rates)
    again.clients.are([21, 22])
    check_error(r"keeps something for 2 clients .* none of the 2 .* and with client_key=", again.clients.require_known)
    again.clients.are([21, 12])
    again.clients.require_known()
    again.close()
    named = run_of(rule(), store=store, **rates, key=lambda address: address - 10)
    named.clients.are([21, 22])
    named.clients.require_known()
    assert one_round(named, [21, 22])[1].status == "joined"
    assert sorted(named.server.rows.client_ids) == [11, 12]


def test_a_store_with_rows_is_not_resumed_with_the_names_in_replies(tmp_path):
    """Nothing would tell which of the stored rows is whose."""
    store = tmp_path / "store"
    run = run_of(ca2fl(buffer_size=2), store=store)
    one_round(run, [11, 12])
    run.close({})
    run = run_of(ca2fl(buffer_size=2), store=store, key="name")
    message = r"its address \(client_key=None\) .* and this run has client_key='name': give"
    check_error(message, run.resume, dict)
    for key in (lambda address: address, None):  # the ids themselves are compared
        run = run_of(ca2fl(buffer_size=2), store=store, key=key)
        run.resume(dict)
        run.close({})
    named = tmp_path / "named"
    for key, refused in (("name", False), ("name", False), ("other", True)):
        run = run_of(ca2fl(buffer_size=2), store=named, key=key)
        if refused:
            check_error(r"with client_key='name' .* and this run has client_key='other'", run.resume, dict)
        else:
            run.resume(dict)
            one_round(run, [11, 12], **{"11": "ann", "12": "bob"})
            run.close({})
    Server.open(named).close()


def test_replies_say_their_clients():
    run = run_of(ca2fl(buffer_size=2), num_clients=3, key="said", server_options={"log": True})
    run.clients.are([101, 102, 103])
    receipts = one_round(run, [101, 102, 103], **{"101": "ann", "102": "bob", "103": "ann"})
    assert [receipt.status for receipt in receipts] == ["joined", "joined", "faulty"]
    assert "another client that is there is 'ann'" in receipts[2].reason
    assert sorted(run.server.rows.client_ids) == ["ann", "bob"]
    assert run.server.tasks == ()
    (changed,) = one_round(run, [101], **{"101": "bob"})
    assert "has said that it is 'ann', and now 'bob'" in changed.reason
    for wrong in (None, 1.5, [1], 2**64, "\udcff"):
        assert one_round(run, [103], **{"103": wrong})[0].status == "faulty"
    run.clients.are([104, 102, 103])  # the client comes back under another address
    assert one_round(run, [104], **{"104": "ann"})[0].status == "joined"
    assert sorted(run.server.rows.client_ids) == ["ann", "bob"]


def test_a_faulty_reply_takes_no_id():
    run = run_of(key="said")
    run.clients.are([1, 2])
    assert replied(run, 1, lambda: Trained({}, client="victim")).status == "faulty"
    assert replied(run, 2, lambda: trained(client="victim")).status == "joined"


def test_ids_of_clients_that_have_gone_are_forgotten():
    run = run_of(key=lambda address: address)
    for address in range(50):
        run.clients.are([address])
        run.clients.id_of(address)
    assert len(run.clients._ids) == 1


def test_a_reply_that_says_its_client_is_converted_from_the_version_of_its_task():
    run = run_of(fedasync(alpha=0.5), key="said")
    run.sent("a", run.assign(1), 1)
    replied(run, 2, lambda: trained(2.0, client="bob"))
    receipt = run.receive("a", lambda: trained(2.0, client="ann"))
    assert receipt.staleness == 1
    assert run.server.tasks == ()


@pytest.mark.parametrize("key", [None, "said"])
def test_clients_beyond_num_clients_get_no_task_and_no_row(key):
    run = run_of(ca2fl(buffer_size=1), num_clients=2, key=key, concurrency=9)
    names = {str(address): f"client {address}" for address in range(5)} if key else {}
    one_round(run, [0, 1], **names)
    run.clients.are(range(5))
    if key is None:
        assert sorted(run.choose()) == [0, 1]
    beyond = one_round(run, [2], **names)[0]
    assert beyond.status == "faulty"
    assert "would be client 3 of num_clients=2" in beyond.reason
    assert len(run.server.rows) == 2


def test_a_rule_of_passes_needs_clients_that_it_knows(tmp_path):
    rule = gsgm(buffer_size=2)
    rates = {"client_lr": 0.1, "local_steps": 1}
    run = run_of(rule, store=tmp_path / "store", num_clients=4, **rates)
    one_round(run, [1, 2])
    run.close({})
    again = run_of(rule, store=tmp_path / "store", num_clients=4, **rates)
    again.clients.are([7, 8, 9])
    check_error(r"keeps something for \d clients", again.clients.require_known)
    again.close()


def test_clients_that_have_entered_get_no_task_until_the_pass_ends():
    """It ends without the clients that have failed, or are not there, once no client trains."""
    run = run_of(gsgm(buffer_size=2), num_clients=6, concurrency=3, client_lr=0.1, local_steps=1)
    run.clients.are([1, 2, 3, 4])
    one_round(run, [1, 2, 3])
    assert run.server.entered == {1, 2, 3}
    assert run.choose() == [4]
    run.sent("a", run.assign(4))
    assert run.choose() == []
    run.fail("a")
    assert (run.server.version, run.server.arrivals_waiting) == (1, 1)
    assert sorted(run.choose()) == [1, 2, 3]
    assert (run.server.version, run.server.entered, run.report.client_ids) == (2, set(), (3,))


def test_clients_in_as_many_rounds_as_they_may_get_no_task():
    run = run_of(dp_fedbuff(buffer_size=2, participations=1), num_clients=3, concurrency=2)
    run.clients.are([1, 2, 3, 4])
    one_round(run, [1, 2])
    assert (run.server.entered, sorted(run.choose()), run.spent) == ({1, 2}, [3, 4], "")
    run.drop(4, "it has failed")
    assert (run.choose(), run.spent) == ([3], "")  # the other one may come back
    run.clients.are([1, 2, 3])
    why = "a round needs 2 clients that were in fewer rounds than dp_fedbuff allows (1), and there are 1"
    assert (run.choose(), run.spent) == ([], why)


def test_a_resumed_run_of_a_rule_that_counts_rounds_knows_its_clients(tmp_path):
    rule = dp_fedbuff(buffer_size=2, participations=2)
    run = run_of(rule, store=tmp_path / "store")
    run.clients.are([1, 2])
    one_round(run, [1, 2])
    run.close({})
    again = run_of(rule, store=tmp_path / "store")
    again.clients.are([11, 12])
    check_error("keeps something for 2 clients", again.clients.require_known)
    again.close()


def warnings_of(run):
    lines = []
    run.clients.warn = lambda message, *arguments: lines.append(message % arguments)
    return lines


def raising(address):
    if address == 3:
        raise LookupError("not in the list")
    return {1: "ann", 2: "bob"}[address]


@pytest.mark.parametrize(
    ("key", "why"), [({1: "ann", 2: "bob"}.get, "client_id is None"), (raising, "not in the list")]
)
def test_a_client_without_an_id_is_left_out(key, why):
    run = run_of(ca2fl(buffer_size=2), num_clients=2, key=key)
    lines = warnings_of(run)
    for _ in range(2):
        run.clients.are([1, 2, 3])
        assert sorted(run.choose()) == [1, 2]
    assert len(lines) == 1
    assert lines[0].startswith("No task goes to client 3: client_key has no id for it:")
    assert why in lines[0]
    run.clients.require_known()
    assert [receipt.status for receipt in one_round(run, [1, 2])] == ["joined", "joined"]
    assert sorted(run.server.rows.client_ids) == ["ann", "bob"]


def test_a_client_that_gets_an_id_later_trains():
    names = {1: "ann"}
    run = run_of(ca2fl(buffer_size=1), key=names.get)
    run.clients.are([1, 2])
    names[2] = "bob"
    run.clients.are([1, 2])
    assert sorted(run.choose()) == [1, 2]


@pytest.mark.parametrize("has_open_task", [False, True])
def test_a_client_that_was_restarted_takes_over_its_id(has_open_task):
    run = run_of(ca2fl(buffer_size=2), num_clients=2, key="said")
    lines = warnings_of(run)
    run.clients.are([101, 102])
    one_round(run, [101, 102], **{"101": "ann", "102": "bob"})
    if has_open_task:
        run.sent("101", run.assign(101), 101)
    run.clients.are([101, 102, 201])  # 101 was killed, and is there until its time is over
    (receipt,) = one_round(run, [201], **{"201": "ann"})
    assert receipt.status == "joined"
    assert lines == ["No task goes to client 101: 'ann' has connected again, as 201"]
    assert 101 not in run.choose()
    if has_open_task:
        late = run.receive("101", lambda: trained(client="ann"))
        assert late.status == "faulty"
        assert "another client that is there is 'ann'" in late.reason
    assert sorted(run.server.rows.client_ids) == ["ann", "bob"]


def test_a_client_that_replies_keeps_its_id():
    run = run_of(ca2fl(buffer_size=2), num_clients=2, key="said", concurrency=3)
    run.clients.are([101, 102])
    one_round(run, [101, 102], **{"101": "ann", "102": "bob"})
    run.clients.are([101, 102, 201])
    assert 101 in run.choose()
    one_round(run, [101], **{"101": "ann"})
    (receipt,) = one_round(run, [201], **{"201": "ann"})
    assert "another client that is there is 'ann'" in receipt.reason
    assert one_round(run, [101], **{"101": "ann"})[0].status == "replaced"


@pytest.mark.parametrize("key", [None, "said"])
def test_clients_without_room_are_named_once_and_end_a_run_in_which_none_may_train(key):
    run = run_of(ca2fl(buffer_size=1), num_clients=2, key=key)
    lines = warnings_of(run)
    names = {str(address): f"client {address}" for address in range(20)} if key else {}
    run.clients.are([0, 1])
    one_round(run, [0, 1], **names)
    run.clients.are([0, *range(5, 20)])
    if key is not None:  # a client says its id when it has trained
        one_round(run, range(5, 20), **names)
    for _ in range(2):
        assert run.choose() == [0]
    lines = [line for line in lines if line.startswith("No task goes to client ")]
    assert len(lines) == (1 if key is None else 15)
    assert "num_clients=2" in lines[0]
    assert ("and 5 others" in lines[0]) is (key is None)
    run.clients.require_some_of_use(0.0)
    run.clients.are(range(5, 20))
    run.clients.require_some_of_use(0.0)
    run.clients.are([0, *range(5, 20)])  # a client that was away for a time
    run.clients.require_some_of_use(50.0)
    run.clients.are(range(5, 20))
    run.clients.require_some_of_use(60.0)
    run.clients.require_some_of_use(119.0)
    check_error("none of the 15 clients .*num_clients=2", run.clients.require_some_of_use, 120.0, error=RuntimeError)


def test_the_end_of_a_long_reason_is_kept():
    reason = "ray::ClientAppActor.run() raised\n" + "  File app.py\n" * 100 + "ValueError: no data for partition 7"
    run = run_of(max_failures=1)
    run.clients.are([1])
    run.sent("a", run.assign(1), 1)
    run.fail("a", reason)
    with pytest.raises(RuntimeError, match=r"example: ray::ClientAppActor.run\(\) raised \.\.\. (.|\n)* partition 7$"):
        run.clients.require_some_of_use()
