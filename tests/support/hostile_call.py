"""Hostile calls of the public Python API: what they do is a result, or an error of the documented family that has
changed nothing.
"""

from afflux import AffluxError, BusyError, UnavailableError
from calls import OF_SERVERS, OFTEN, STARTED, STATELESS, fingerprint
from spoiling import spoiled

NAMES = list(OF_SERVERS)
WEIGHTS = [OFTEN.get(name, 1) for name in NAMES]


def hostile_call(rng, servers, loaded):
    """Any call; returns "done", "refused", or what is wrong."""
    if rng.random() < 0.5:
        return function_call(rng)
    return method_call(rng, rng.choices(NAMES, WEIGHTS)[0], servers, rng.choice(list(servers)), loaded)


def function_call(rng):
    """Of what belongs to no server: operations, layouts, options, parts of rules."""
    name = rng.choice(list(STATELESS))
    error = _error_of(rng, *STATELESS[name](rng))
    return _outcome(name, error)


def method_call(rng, name, servers, which, loaded):
    """A method of the server `which`. `loaded` names those that took a state, whose sums and moments may be anything
    finite: a step that such a state makes fail is no finding, and the server is replaced.
    """
    if which in loaded and rng.random() < 0.1:  # its steps are not judged: it must not stay so for the whole batch
        servers[which] = STARTED[which]()
        loaded.discard(which)
    server = servers[which]
    function, given = OF_SERVERS[name](rng, server)
    sound = before = fingerprint(server)  # calls.py saves the server's own state
    error = _error_of(rng, function, given)
    if isinstance(error, BusyError):
        server.flush()
        return "done"
    if error is None and name == "load_state_dict" and fingerprint(server) != sound:
        loaded.add(which)
    if which in loaded and "wrote a value that is not finite" in str(error):
        servers[which] = STARTED[which]()
        loaded.discard(which)
    elif isinstance(error, AffluxError | UnavailableError | MemoryError) and fingerprint(server) != before:
        return f"{name}: the state has changed, with {error!r:.200}"
    return _outcome(name, error)


def _error_of(rng, function, given):
    try:
        _spoil(given, rng)
        function(**given)
    except Exception as error:
        return error
    return None


def _spoil(given, rng):
    """Replaces one or two of the arguments, of one call in six none."""
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
        if given:
            name = rng.choice(list(given))
            given[name] = spoiled(given[name], rng)


def _outcome(name, error):
    if error is None:
        return "done"
    if isinstance(error, AffluxError | UnavailableError | MemoryError):
        return "refused"
    return f"{name}: {type(error).__name__} is no error of the family: {error!r:.200}"
