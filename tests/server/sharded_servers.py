"""The suites of `Server`, with the vectors of every server in three shards: a plugin of pytest.

    python -m pytest -p sharded_servers tests/server/test_server.py
    python tests/server/sharded_servers.py    prints the rules' digests

Servers that check their versions have their vectors in one piece.
"""

from contextlib import closing, suppress
from pathlib import Path

import afflux
import server_plugins
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.store.index import Index

#: What these tests look at, shards have not: callers have copies of versions, and the files of a
#: store are in folders of shards.
OF_ONE_PIECE = (
    "test_a_damaged_row_is_found_when_its_client_pushes",
    "test_a_file_that_cannot_be_written",
    "test_a_full_buffer_that_cannot_step_yet_waits_for_the_next_push",
    "test_a_load_that_runs_out_of_memory_changes_nothing",
    "test_a_row_that_cannot_be_read_has_not_joined",
    "test_a_segment_that_is_cut_off_while_it_is_mapped",
    "test_a_store_against_memory[fedbuff-True]",
    "test_a_single_thread_needs_one_slot",
    "test_a_step_waits_until_a_task_is_read",
    "test_a_view_into_a_version_keeps_it",
    "test_an_error_of_the_server_is_no_fault_of_a_client",
    "test_checksums_of_a_round_that_could_not_be_kept_at_first",
    "test_damaged_vectors_are_found_at_opening",
    "test_foreign_arrays",
    "test_longer_ids_of_older_stores",
    "test_max_versions_raises_and_loses_nothing",
    "test_pulled_versions_and_their_numbers",
    "test_repair_lists_and_drops_ids_of_every_kind",
    "test_the_sweep_that_copies_a_vector_converts_it",
    "test_truncated_segments",
    "test_versions_nobody_holds_are_used_again",
)


class ShardedServer(afflux.Server):
    def __init__(self, rule, params, options=None, **arguments):
        if options is None:  # else by `open`
            arguments.setdefault("plane", ShardedPlane(3))
        super().__init__(rule, params, options, **arguments)

    @classmethod
    def open(cls, path, rule=None, **options):
        with suppress(Exception), closing(Index(Path(path) / "index.sqlite", read_only=True)) as index:
            if "cuts" in index.facts()["server"]:
                options.setdefault("plane", ShardedPlane(3))
        return super().open(path, rule, **options)


server_plugins.use(ShardedServer)
pytest_collection_modifyitems = server_plugins.skipping(OF_ONE_PIECE, "of vectors in one piece")


if __name__ == "__main__":
    server_plugins.print_digests()
