"""Server objects of NVFlare's Collab for tests, and runs of them over the sites of nvflare_sites.py."""

import numpy as np
import pytest

pytest.importorskip("nvflare.collab", reason="needs nvflare: make test-integrations")

from afflux.integrations.nvflare import AsyncServer
from afflux.rules import ca2fl
from nvflare_sites import Sites, adds

NAMES = ["site-1", "9223372036854775815", "18446744073709551615", "-1"]  # NVFlare's ids are texts


def initial(seed=0):
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((3, 4), np.float32), "b": rng.standard_normal(5, np.float32)}


class Small(AsyncServer):
    """The server object of these tests."""

    model = staticmethod(initial)

    def initial_model(self):
        return self.model()


def small(rule, options=None, rounds=3, *, settings=None, **arguments):
    settings = {"concurrency": 3, "poll_interval": 0.001, "retry_after": 0.0, **(settings or {})}
    return Small(rule, options, rounds, settings=settings, **arguments)


def stored(store, rounds):
    return small(ca2fl(buffer_size=2), rounds=rounds, settings={"store": str(store), "checkpoint_every": 2})


def run(server, sites, monkeypatch):
    with sites.around(server, monkeypatch):
        return server.run()


def four(*values, kind=Sites, **options):
    functions = {name: adds(value, 10 * (i + 1)) for i, (name, value) in enumerate(zip(NAMES, values, strict=True))}
    return kind(functions, **options)
