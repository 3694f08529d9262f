"""The suites of servers and rules pass with the vectors of each server in three shards (sharded_servers.py)."""

import json
import os
import sys

import pytest

from afflux.selftest import digest
from builds import run
from conftest import ROOT, found
from pairwise import soak_all

SUITES = ["server loading passes", "store_commits"]
MORE_SUITES = [
    "concurrency conversions edges ids layout limits log streaming streaming_threads task_versions tasks",
    "by_hand composed rules rules_contract wkafl",
    "store store_errors saved_servers store_gaps store_ids store_machine recent",
]


@pytest.fixture(scope="module")
def environment():
    names = ("sharded_servers.py", "conftest.py", "pairwise.py", "fake_ray.py")
    folders = {found(name).parent for name in names}
    return {"PYTHONPATH": os.pathsep.join(map(str, [ROOT / "python", *sorted(folders)]))}


def test_every_rule_has_the_bits_of_one_piece(environment):
    digests = json.loads(run(sys.executable, found("sharded_servers.py"), **environment))
    golden = digest.golden()
    assert digests == {name: golden[name] for name in digests}


ON_RAY = [(each, "ray_servers") for each in ("server loading passes", "concurrency log tasks", "store_commits store")]
SHARDED = [(each, "sharded_servers") for each in MORE_SUITES]


@pytest.mark.parametrize(
    ("selection", "plugin"), [*((each, "sharded_servers") for each in SUITES), *soak_all([*SHARDED, *ON_RAY])]
)
def test_the_suites_pass_with_shards(environment, selection, plugin):
    files = [str(found(f"test_{name}.py")) for name in selection.split()]
    options = ["-q", f"--rootdir={ROOT}", "-p", plugin, "-p", "no:cacheprovider"]
    assert "passed" in run(sys.executable, "-m", "pytest", *options, *files, **environment)
