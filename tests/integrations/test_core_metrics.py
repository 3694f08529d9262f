"""Metrics of clients: bounded, stored with the arrivals that wait, and given to the step that these make."""

from afflux.integrations._reading import bounded
from afflux.rules import fedbuff
from core_runs import replied, run_of, trained


def test_metrics_are_bounded():
    many = {f"k{i}": float(i) for i in range(200)}
    assert bounded(many) == {f"k{i}": float(i) for i in range(100)}
    assert bounded(many, "k150") == {**bounded(many), "k150": 150.0}
    odd = {"x" * 101: 1.0, "huge": 10**400, "text": "a", 3: 1.0, "mixed": [1.0, "a"], "none": None, "flag": True}
    assert bounded({**odd, "good": 1, "nan": [float("nan")]}).keys() == {"good", "nan"}
    lists = {"long": [1.0] * 1001, "first": [1.0] * 600, "second": [1.0] * 600, "third": [1.0] * 400, "last": 1.0}
    assert bounded(lists).keys() == {"first", "third"}
    assert bounded({"weight": "odd"}, "weight") == {"weight": "odd"}
    assert bounded({"a": 1.0}, "weight") == {"a": 1.0}


def test_metrics_of_arrivals_that_wait_are_stored(tmp_path):
    run = run_of(fedbuff(buffer_size=2), store=tmp_path / "store")
    replied(run, 1, lambda: trained(metrics={"accuracy": 0.25}))
    run.close({})
    again = run_of(fedbuff(buffer_size=2), store=tmp_path / "store")
    again.resume(dict)
    assert replied(again, 2, lambda: trained(metrics={"accuracy": 0.75})).report.version == 1
    assert again.take_metrics() == [{"accuracy": 0.25}, {"accuracy": 0.75}]
    again.close()


def test_metrics_of_a_replaced_arrival_are_replaced():
    run = run_of(fedbuff(buffer_size=2), server_options={"duplicates": "latest"})
    for client, loss in ((1, 0.0), (1, 1.0), (1, 2.0), (2, 3.0)):
        replied(run, client, lambda loss=loss: trained(metrics={"loss": loss}))
    assert run.server.version == 1
    assert run.take_metrics() == [{"loss": 2.0}, {"loss": 3.0}]
    assert run.take_metrics() == []
