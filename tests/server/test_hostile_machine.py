"""Hypothesis makes hostile calls of a server, its store and layouts: each gives a result, or an error of the documented
family that has changed nothing.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

pytest.importorskip("torch")

from afflux import Server
from calls import STARTED, fingerprint
from hostile_call import NAMES, WEIGHTS, function_call, method_call
from inside import aggregator_of

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = int(os.environ.get("AFFLUX_EXAMPLES", "3"))
RANDOM = st.randoms(use_true_random=False)
METHODS = st.sampled_from([name for name, often in zip(NAMES, WEIGHTS, strict=True) for _ in range(often)])
#: Servers whose rule and options go with a store.
STORED = [name for name in STARTED if name not in ("inplace", "record")]


class Hostile(RuleBasedStateMachine):
    name = "fedbuff"
    stored = False

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        more = {"store": self.folder / "store"} if self.stored else {}
        self.servers, self.loaded = {self.name: STARTED[self.name](**more)}, set()

    @rule(rng=RANDOM, method=METHODS)
    def calls_the_server(self, rng, method):
        found = method_call(rng, method, self.servers, self.name, self.loaded)
        assert found in ("done", "refused"), found

    @rule(rng=RANDOM)
    def calls_a_function(self, rng):
        found = function_call(rng)
        assert found in ("done", "refused"), found

    @precondition(lambda self: self.stored)
    @rule()
    def opens_the_store_again(self):
        server = self.servers[self.name]
        server.checkpoint()
        before = fingerprint(server)
        server.close()
        waits = aggregator_of(server).admission.next_rule is not None  # a rule that is given would replace it
        self.servers[self.name] = Server.open(self.folder / "store", rule=None if waits else server.rule)
        assert fingerprint(self.servers[self.name]) == before

    @invariant()
    def its_state_can_be_read(self):
        fingerprint(self.servers[self.name])

    def teardown(self):
        if self.stored:
            self.servers[self.name].close(checkpoint=False)
        shutil.rmtree(self.folder)


@pytest.mark.parametrize(("name", "stored"), [*((name, False) for name in STARTED), *((name, True) for name in STORED)])
def test_hostile_calls_change_nothing(name, stored):
    run_state_machine_as_test(
        type("Hostile", (Hostile,), {"name": name, "stored": stored}),
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
