"""The programs in examples/ run as described. tests/integrations has those of other frameworks."""

import re
import runpy
import signal
import subprocess
import sys
import textwrap

import pytest

from conftest import ROOT
from pairwise import soak

PAGE = ROOT / "docs" / "start" / "tutorial.md"


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


def test_a_replay_after_a_kill():
    assert printed("replay_after_a_kill.py") == "34 joins, the same params: True\n"


def test_own_rule_bears_wrong_clients():
    plain, clipped = re.findall(r"(\w+): (\d+\.\d) from the optimum", printed("own_rule.py"))
    assert plain[0] == "fedbuff"
    assert clipped[0] == "clipped_fedbuff"
    assert float(clipped[1]) < 1 < 1000 < float(plain[1])


def test_http_server():
    pytest.importorskip("aiohttp")
    assert printed("http_server.py") == "240 models joined, 60 versions, largest error 0.000\n"


# ---- the tutorial ----------------------------------------------------------------------------------------------------


def test_the_code_of_the_tutorial_is_that_of_its_programs(monkeypatch, capsys):
    """Each block is a part of them; two lines that make other servers run in their place."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(ROOT / "examples")
    program, rule = (ROOT / "examples" / name for name in ("tutorial.py", "tutorial_rule.py"))
    texts = [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    servers = [text for text in texts if text.startswith("server = Server(")]
    before_step_6 = program.read_text().replace("from tutorial_rule import fresh_first\n", "")
    before_step_6 = before_step_6.replace(', "fresh_first": fresh_first', "")
    source = program.read_text() + before_step_6 + rule.read_text()
    unindented = re.sub(r"^ +", "", source, flags=re.MULTILINE)
    assert (len(servers), len(texts)) == (2, 7)
    assert [text for text in texts if text not in servers and text not in source and text not in unindented] == []
    names = runpy.run_path(str(program))
    names["run"].__globals__["ARRIVALS"] = 10
    for text in servers:
        exec(compile(text, "tutorial.md", "exec"), names)
        names["run"](names["server"])
        assert names["server"].joins == 10
    assert capsys.readouterr().out


def test_the_tutorial_survives_a_kill(tmp_path):
    """The second process continues from a version that the first one has reported or a later one, and learns on."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    command = [sys.executable, ROOT / "examples" / "tutorial.py", "ca2fl", "--store", tmp_path / "run" / "store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = next(line for line in process.stdout if "240 arrivals" in line)
        process.send_signal(signal.SIGKILL)
    before = int(re.search(r"version (\d+)", line)[1])
    first, *_, last = printed("tutorial.py", *command[2:]).splitlines()
    version, arrivals = map(int, re.search(r"version (\d+), (\d+) arrivals", first).groups())
    assert before <= version
    assert 200 <= arrivals < 600  # pushes that wait, or replace one that waits, are lost
    assert float(re.fullmatch(r"  600 arrivals, version \d+, accuracy (0\.\d+)", last)[1]) > 0.75


@pytest.mark.soak
def test_the_tutorials_learning_rates():
    """0.2 is too small, 1 is not: with the rule of step 6, whose file is beside the program."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    lines = printed("tutorial.py", "fresh_first", "--server-lr", "0.2", "1").splitlines()
    small, middle = (float(line.rpartition(" ")[2]) for line in lines if "600 arrivals" in line)
    assert small < 0.6 < middle
