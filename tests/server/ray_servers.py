"""The suites of `Server`, in three shards of `fake_ray`, with pickled messages: a plugin of pytest.

python -m pytest -p ray_servers tests/server/test_server.py
AFFLUX_RAY=needed python -m pytest -p ray_servers tests/server/test_server.py    in Ray's actors
"""

import os
import warnings
from collections import deque

import pytest

import fake_ray
import server_plugins
import sharded_servers
from afflux.distributed import RayPlane, connection, ray_plane

#: Not possible here: objects of a test that cannot be pickled, and what they do amid a sweep, or note in a shard; the
#: end of actors when their server is deleted.
OF_ONE_PROCESS = (
    "test_a_state_with_more_arrivals_than_the_rule_of_the_server_takes",
    "test_an_interrupted_step_is_finished_by_the_next_call",
    "test_the_next_buffer_fills_while_a_round_is_made",
    "test_what_was_not_flushed_is_as_soon_as_that_is_asked_for",
)

if os.environ.get("AFFLUX_RAY") != "needed":
    ray = fake_ray.FakeRay()
    ray.messages = deque(maxlen=1)
    connection.import_ray = lambda: ray
else:

    @pytest.fixture(scope="session", autouse=True)
    def cluster(processes_end):
        """One cluster for all tests, which ends before those processes are looked for that tests have left."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray itself
            RayPlane.connect()
        yield
        connection.import_ray().shutdown()


ray_plane.LEAST_ELEMENTS = 0  # no warning
sharded_servers.ShardedPlane = RayPlane
names = (*sharded_servers.OF_ONE_PIECE, *OF_ONE_PROCESS)
pytest_collection_modifyitems = server_plugins.skipping(names, "of vectors in one process")
