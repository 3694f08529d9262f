"""What NVFlare's clients return, whatever it is; calls that fail, get lost or come late; jobs that are aborted."""

import re
import time

import numpy as np
import pytest
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.collab import CollabRecipe
from nvflare.collab.api.exceptions import RunAborted

from afflux import Server
from afflux.integrations import nvflare as adapter
from afflux.rules import fedbuff
from conftest import check_error, check_raises
from nvflare_servers import run, small
from nvflare_sites import Client, Lost, Sites, adds, flat


def bad(kind):
    """A site whose results are of no use."""
    good = adds(1.0)

    def site(model, version):
        if kind == "lost":
            raise Lost
        if kind == "error":
            raise MemoryError("out of memory")
        params, metrics = good(model, version)
        if kind == "nothing":
            return None
        if kind == "text":
            return "done"
        if kind == "three":
            return params, metrics, {}
        if kind == "metrics":
            return params, [1, 2]
        if kind == "diff":
            return FLModel(params_type="DIFF", params=params)
        if kind == "none":
            return FLModel(metrics={"accuracy": 0.5})
        if kind == "number":
            params["b"] = 3
        elif kind == "texts":
            params["b"] = np.array(["a"] * 5)
        elif kind == "objects":
            params["b"] = np.array([None] * 5)
        elif kind == "keys":
            params = {0: params["w"], 1: params["b"]}
        steps = {"list": [1, 2], "large": 2**64}
        return params, {**metrics, "num_steps": steps.get(kind, 10)}

    return site


FAULTY = ["nothing", "text", "three", "metrics", "diff", "none", "number", "texts", "objects", "keys", "list", "large"]
FAULTS = {"error": "failed", **dict.fromkeys(FAULTY, "faulty")}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_result_that_is_of_no_use_changes_nothing_but_a_count(kind, monkeypatch):
    """With one site that trains, and beside it another one, the bits are those of the site alone."""
    alone = small(fedbuff(buffer_size=2), settings={"concurrency": 1})
    first = run(alone, Sites({"site-1": adds(0.5)}), monkeypatch)
    sites = Sites({"site-1": adds(0.5), "9223372036854775808": bad(kind)}, seed=1)
    own = small(fedbuff(buffer_size=2), settings={"concurrency": 2, "max_failures": 10**6})
    result = run(own, sites, monkeypatch)
    assert flat(result).tobytes() == flat(first).tobytes()
    counts = {**own.server.counts, **own.lost}
    assert counts.pop(FAULTS[kind]) > 0
    assert counts.pop("joined") == 6
    assert not any(counts.values())
    if FAULTS[kind] == "faulty":
        assert own.server.faults[0].client_id == "9223372036854775808"
        assert own.server.faults[0].reason


def test_lost_late_and_repeated_results(monkeypatch):
    """Site 7's first result comes after its time is over, those of site 5 come twice, site 9 returns nothing."""
    late, again = [], []

    class Slow(Sites):
        def deliver(self):
            time.sleep(0.001)
            with self.lock:
                for each in [*self.under_way]:
                    if each[1].target_name == "site-7" and not late:
                        late.append(each)
                        self.under_way.remove(each)
            if late and len(again) > 200:
                late[0][1].set_result(late[0][2])
            super().deliver()

    class Twice(adapter.CollabTransport):
        def _take(self, call, result, key):
            super()._take(call, result, key)
            if call.target_name == "site-5":
                again.append(key)
                super()._take(call, result, key)

    monkeypatch.setattr("nvflare_sites.CollabTransport", Twice)
    sites = Slow({"site-5": adds(0.5), "site-7": adds(0.5), "site-9": bad("lost")})
    own = small(fedbuff(buffer_size=2), rounds=200, settings={"timeout": 0.1, "max_failures": 10**6})
    result = run(own, sites, monkeypatch)
    assert own.lost["overdue"] >= 2
    assert own.lost["unknown"] >= len(again) - 2 > 100
    assert late[0][1]._completed is False or own.lost["unknown"] > len(again) - 2
    assert own.server.counts["joined"] == 400
    assert own.server.counts["faulty"] == 0
    assert own.server.tasks == ()
    assert np.isfinite(flat(result)).all()


def test_a_run_with_useless_clients_alone_ends(monkeypatch):
    own = small("fedbuff", settings={"max_failures": 2})
    check_error("none of 1.*out of memory", run, own, Sites({"site-1": bad("error")}), monkeypatch, error=RuntimeError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"call": "learn"}, r"call='learn' cannot be called at any client: .*does not have method 'learn'"),
        ({"call": "_train"}, r"call='_train' cannot be called at any client: .*does not have method '_train'"),
        ({"call_args": {"epochs": 3}}, r"call='train' cannot be called at any client: .*epochs"),
    ],
)
def test_a_function_that_no_client_publishes_ends_the_job_at_once(arguments, message, monkeypatch):
    sites = Sites({"site-1": adds(1.0), "site-2": adds(1.0)})
    check_error(message, run, small("fedbuff", **arguments), sites, monkeypatch)
    assert sites.calls == []


@pytest.mark.parametrize("result", [0.0, 0.5, (0.5, 1.0), "0.5", []])
def test_an_evaluation_that_returns_no_numbers_by_name_ends_the_job(result, monkeypatch):
    own = small("fedbuff")
    own.evaluate = lambda version, model: result
    message = rf"\[AsyncServer\] evaluate returned {re.escape(repr(result))}, must be numbers by name, or None"
    check_error(message, run, own, Sites({"site-1": adds(1.0)}), monkeypatch)
    own.evaluate = lambda version, model: {} if version else None
    run(own, Sites({"site-1": adds(1.0)}), monkeypatch)


def test_filters_of_a_job_are_warned_of(caplog):
    """Collab passes no results through them."""

    def finalized(*filters):
        recipe = CollabRecipe("job", server=small("fedbuff"), client=Client())
        for each in filters:
            recipe.add_client_output_filter(each, tasks=["*"])
            recipe.add_server_output_filter(each, tasks=["*"])
        caplog.clear()
        recipe.finalize()
        return [message for message in caplog.messages if "filters" in message]

    assert finalized() == []
    (line,) = finalized(ExcludeVars(exclude_vars="b"))
    assert "no effect: ExcludeVars. Apply them in train() of the client" in line


def test_a_job_that_is_aborted_ends_with_its_state_stored(tmp_path, monkeypatch):
    sites = Sites({"site-1": adds(1.0), "site-2": bad("lost")})

    def stop(model, version):
        if version == 3:
            sites.abort_signal.trigger(True)
        return adds(1.0)(model, version)

    sites.functions["site-1"] = stop
    own = small(fedbuff(buffer_size=1), rounds=10**6, settings={"store": str(tmp_path / "store")})
    check_raises(RunAborted, run, own, sites, monkeypatch)
    with Server.open(tmp_path / "store") as server:
        assert server.version == 3
        assert server.tasks  # closed at the next start
