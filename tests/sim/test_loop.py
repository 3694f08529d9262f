"""The loop alone, without what a run records, writes and evaluates."""

from dataclasses import replace

import numpy as np
import pytest

from afflux.lab.results.run_result import params_sha256
from afflux.lab.runs.setup import RunSetup
from afflux.ops.errors import ConfigError
from afflux.rules.specs import parse_rule
from afflux.sim.clients.flat_model import reproducible_libraries
from afflux.sim.clients.schedule import Arrival, Dispatch, Dropout
from afflux.sim.clients.training import SerialTraining
from afflux.sim.loop import PushedUpdate
from afflux.sim.workload.config import SimConfig
from conftest import ROOT
from made_runs import run, run_paired

OORT = f"{ROOT}/examples/oort_selection.py:oort"
SMALL = SimConfig(model="logreg", num_clients=12, concurrency=4, arrivals=40, eval_every=15, local_steps=1)
ROUNDS = {"protocol": "rounds", "concurrency": SimConfig.concurrency, "stale_models": 3}
PRESENCE = {"dropout": "rates:never=0.1:late=0.2", "timeout": 20.0, "selection": OORT}


def loop_of(rule, seed=0, config=SMALL, **options):
    """A loop of one server; and the server."""
    setup = RunSetup(config, seed)
    server = setup.new_server(rule)
    return setup.loop(rule, [server], SerialTraining(setup.trainer, seed), **options), server


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("fedbuff:buffer_size=3", {}),
        ("ca2fl:buffer_size=4", {"delays": "fadas-mild"}),
        ("gsgm:buffer_size=5", {"selection": "blocked-until-pass-ends"}),
        ("fedavg:buffer_size=3", {}),
        ("afa_cs:buffer_size=4", {"client_optimizer": "scaffold", **ROUNDS}),
        ("fedasync", {"virtual_time": 9.0}),
        ("fedbuff:buffer_size=3", PRESENCE),
    ],
)
def test_a_loop_alone_has_the_bits_of_a_run(rule, settings):
    config, spec = replace(SMALL, **settings), parse_rule(rule)
    whole = run(spec, 2, config)
    with reproducible_libraries():
        loop, server = loop_of(spec, 2, config)
        pushed = [event for event in loop if isinstance(event, PushedUpdate)]
    assert params_sha256(server.params) == whole.digest
    assert [event.receipts[0].staleness for event in pushed] == whole.staleness.tolist()
    assert [event.number for event in pushed] == [*range(len(whole.staleness))]
    # The server counts the steps between the version that a client has pulled, and its push.
    if "gsgm" not in rule:
        steps = np.cumsum([0, *(event.receipts[0].report is not None for event in pushed)])
        assert [steps[event.number] - event.versions[0] for event in pushed] == whole.staleness.tolist()


def test_items_are_in_the_order_of_the_schedule_and_of_virtual_time():
    config, spec = replace(SMALL, **PRESENCE), parse_rule("fedbuff:buffer_size=3")
    loop, _ = loop_of(spec, 0, config)
    items, training = [], set()
    for event in loop:
        items.append(event.event if isinstance(event, PushedUpdate) else event)
        training ^= {items[-1].sequence} if not isinstance(event, Dropout) else set()
        assert {sequence for sequence, *_ in loop.state().training} == training
        assert loop.state().events == len(items)
    assert {type(item) for item in items} == {Dispatch, Dropout, Arrival}
    assert [item.time for item in items] == sorted(item.time for item in items)


def test_a_loop_ends_before_an_event():
    spec = parse_rule("fedbuff:buffer_size=3")
    loop, server = loop_of(spec, ended=lambda: server.version == 2)
    numbers = [event.number for event in loop if isinstance(event, PushedUpdate)]
    assert numbers == [*range(6)]


def test_a_second_server_gets_the_updates_of_the_first():
    specs = [parse_rule("fedbuff:buffer_size=3"), parse_rule("ca2fl:buffer_size=4")]
    paired = run_paired(specs, 1, SMALL)
    with reproducible_libraries():
        setup = RunSetup(SMALL, 1)
        servers = [setup.new_server(spec) for spec in specs]
        for event in setup.loop(specs[0], servers, SerialTraining(setup.trainer, 1)):
            assert not isinstance(event, PushedUpdate) or len(event.receipts) == len(event.versions) == 2
    assert [params_sha256(server.params) for server in servers] == [result.digest for result in paired]


def test_a_loop_that_is_restored_to_other_trainings_is_refused():
    spec = parse_rule("fedbuff:buffer_size=3")
    loop, server = loop_of(spec)
    for event in loop:
        if isinstance(event, PushedUpdate):
            break
    other, _ = loop_of(spec, seed=1)
    versions = {model.version: model for model in (*loop.older_versions(), server.pull())}
    other.restore(loop.state(), loop.state_arrays(), versions)
    with pytest.raises(ConfigError, match="other clients train than in the run that was interrupted"):
        next(iter(other))
