"""The programs in examples/ run as described. tests/integrations has those of other frameworks."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT
from pairwise import soak


def printed(name, *arguments):
    """What the example prints."""
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True).stdout


@pytest.mark.parametrize("path", [*(ROOT / "examples").glob("*.py")], ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 80


@pytest.mark.parametrize("rule", [*soak("fedbuff"), "fedasync", *soak("ca2fl"), "wkafl"])
def test_own_loop_runs_with_any_rule(rule):
    """The same file, and one word of its command line."""
    pytest.importorskip("sklearn")
    options = [] if rule == "fedasync" else ["--option", "buffer_size=5"]
    options += ["--option", "server_lr=0.5"] if rule == "wkafl" else []
    name, accuracy = re.fullmatch(
        r"(\w+): \d+ versions, accuracy (0\.\d+)\n", printed("own_loop.py", rule, *options)
    ).groups()
    assert name == rule
    assert float(accuracy) > 0.85


def test_threads():
    """400 tasks make 80 versions of 5 arrivals each, in whatever order threads finish."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    accuracy, staleness = re.fullmatch(
        r"80 versions, accuracy (0\.\d+), mean staleness (\d+\.\d)\n", printed("threads.py")
    ).groups()
    assert float(accuracy) > 0.85
    assert float(staleness) <= 80


def test_own_rule_bears_wrong_clients():
    plain, clipped = re.findall(r"(\w+): (\d+\.\d) from the optimum", printed("own_rule.py"))
    assert plain[0] == "fedbuff"
    assert clipped[0] == "clipped_fedbuff"
    assert float(clipped[1]) < 1 < 1000 < float(plain[1])


def test_http_server():
    pytest.importorskip("aiohttp")
    assert printed("http_server.py") == "240 models joined, 60 versions, largest error 0.000\n"
