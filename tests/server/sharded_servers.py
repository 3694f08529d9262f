"""The suites of `Server`, with the vectors of every server in memory in three shards: a plugin of pytest.

    python -m pytest -p sharded_servers tests/server/test_server.py
    python tests/server/sharded_servers.py    prints the rules' digests

Servers with a store, and those that check their versions, have their vectors in one piece.
"""

import json
from dataclasses import asdict

import pytest

import afflux
import afflux.server
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.rules import RULES

#: What these tests look at, shards have not: callers have copies of versions, and vectors are not lent.
OF_ONE_PIECE = (
    "test_a_full_buffer_that_cannot_step_yet_waits_for_the_next_push",
    "test_a_load_that_runs_out_of_memory_changes_nothing",
    "test_a_single_thread_needs_one_slot",
    "test_a_step_waits_until_a_task_is_read",
    "test_a_view_into_a_version_keeps_it",
    "test_max_versions_raises_and_loses_nothing",
    "test_one_element_of_any_stride_can_be_lent",
    "test_pulled_versions_and_their_numbers",
    "test_versions_nobody_holds_are_used_again",
)


class ShardedServer(afflux.Server):
    def __init__(self, rule, params, options=None, **arguments):
        chosen = (asdict(options) if isinstance(options, ServerOptions) else {}) | arguments
        opened = options is not None  # by `open`
        if not (opened or chosen.get("check_versions") or chosen.get("store")):
            arguments.setdefault("plane", ShardedPlane(3))
        super().__init__(rule, params, options, **arguments)


afflux.Server = afflux.server.Server = afflux.server.server.Server = ShardedServer


def pytest_collection_modifyitems(items):
    for item in items:
        if item.originalname in OF_ONE_PIECE:
            item.add_marker(pytest.mark.skip(reason="of vectors in one piece"))


if __name__ == "__main__":
    from afflux.selftest import digest

    print(json.dumps({name: digest.rule(name, 1) for name in RULES}))
