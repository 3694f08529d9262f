"""Hostile values in the place of each argument of a server's methods: errors are of the family, and change nothing."""

from itertools import cycle
from random import Random

import pytest

from afflux import AffluxError, BusyError, UnavailableError
from calls import OF_SERVERS, STARTED, fingerprint
from hostile import SCALARS
from hostile_arrays import ARRAYS

pytestmark = pytest.mark.filterwarnings("ignore")
#: Those that take arguments, and the servers that have them.
NO_ARGUMENTS = ("flush", "discard", "poll", "end_pass")
METHODS = {name: STARTED for name in OF_SERVERS if name not in (*NO_ARGUMENTS, "set_rule_vector")}
METHODS["set_rule_vector"] = ["zenopp"]
SERVERS = METHODS | {"end_pass": ["gsgm"]}


def error_of(call, given):
    """What a call raises, if that is of the documented family; None if it raises nothing."""
    try:
        call(**given)
    except (AffluxError, UnavailableError, MemoryError) as error:
        return error
    return None


@pytest.mark.parametrize("method", METHODS)
def test_an_error_changes_nothing(method):
    turns = cycle([(name, STARTED[name]()) for name in METHODS[method]])
    errors = 0
    for number, hostile in enumerate([*SCALARS, *ARRAYS]):
        name, server = next(turns)
        for argument in OF_SERVERS[method](Random(number), server)[1]:
            call, given = OF_SERVERS[method](Random(number), server)
            if argument not in given:
                continue
            before = fingerprint(server)
            error = error_of(call, given | {argument: hostile()})
            if error is not None:
                errors += 1
                assert str(error).startswith("["), (name, argument)
                assert fingerprint(server) == before, (name, argument, error)
    assert errors > 300


@pytest.mark.parametrize("name", STARTED)
def test_the_calls_work_as_they_are(name):
    server, rng, worked = STARTED[name](), Random(name), set()
    for _ in range(60):
        for method in OF_SERVERS:
            if name not in SERVERS.get(method, STARTED):
                continue
            call, given = OF_SERVERS[method](rng, server)
            error = error_of(call, given)
            if error is None:
                worked.add(method)
            elif isinstance(error, BusyError):
                server.flush()
    assert server.version > 3
    assert worked == {method for method in OF_SERVERS if name in SERVERS.get(method, STARTED)}
