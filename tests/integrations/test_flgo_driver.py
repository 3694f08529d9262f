"""FLGo's own driver: the example killed and resumed, and with three rules; the page. Needs flgo and scikit-learn."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import flgo_points as points

pytest.importorskip("sklearn", reason="needs scikit-learn: make test-integrations")

pytestmark = pytest.mark.filterwarnings("default")  # FLGo's and torch's own
ROOT = Path(__file__).parents[2]


def started(*arguments):
    command = [sys.executable, "-u", ROOT / "examples" / "flgo" / "digits.py", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def accuracies_in(said):
    """The accuracies that FLGo's logger shows."""
    return [float(accuracy) for accuracy in re.findall(r"INFO test_accuracy +([0-9.]+)", said)]


def run(*arguments):
    """What the example says: everything, and the accuracies."""
    process = started(*arguments)
    said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said[-3000:]
    return said, accuracies_in(said)


@pytest.mark.soak  # the next test asserts the same of a run in two parts
@pytest.mark.parametrize("rule", ["fadas", "fedbuff", "ca2fl"])
def test_the_example_learns(rule):
    said, accuracies = run("--rule", rule, "--rounds", 30)
    assert len(accuracies) == 7  # before the first round, and after each fifth
    assert accuracies[0] < 0.3
    assert accuracies[-1] > 0.7
    assert len(re.findall(r"-Round \d+-", said)) == 30
    assert re.fullmatch(rf"{rule}: accuracy [0-9.]+ % after 30 rounds", said.splitlines()[-1])


def test_the_example_is_killed_and_goes_on_and_learns(tmp_path):
    process = started("--rule", "ca2fl", "--rounds", 1000, "--folder", tmp_path)
    rounds, accuracies = [], []
    for line in process.stdout:
        accuracies += accuracies_in(line)
        rounds += map(int, re.findall(r"-Round (\d+)-", line))
        if rounds and rounds[-1] >= 12:
            break
    process.send_signal(signal.SIGKILL)
    assert process.wait(600) == -signal.SIGKILL
    process.stdout.close()
    assert rounds == [*range(1, len(rounds) + 1)]
    assert accuracies[0] < 0.3  # before the first round
    said, accuracies = run("--rule", "ca2fl", "--rounds", rounds[-1] + 10, "--folder", tmp_path)
    (after,) = map(int, re.findall(r"Continues after round (\d+) at time", said))
    assert after >= rounds[-1] - 1  # the round was announced when its step was stored
    again = [int(number) for number in re.findall(r"-Round (\d+)-", said)]
    assert again == [*range(after + 1, rounds[-1] + 11)]
    assert accuracies[-1] > 0.6
    assert re.fullmatch(rf"ca2fl: accuracy [0-9.]+ % after {rounds[-1] + 10} rounds", said.splitlines()[-1])


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    """Its blocks, one after the other; what they print stands beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    points.make_task(tmp_path, 10, "my_task")
    page = (ROOT / "docs" / "guides" / "flgo.md").read_text()
    names, promised = {"MySimulator": points.Latencies}, []
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "flgo.md", "exec"), names)
        promised += re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line in promised] == promised
    # The last block mends the template's data sets.
    dataset = points.torch.utils.data.TensorDataset(points.torch.arange(6))
    loader = points.torch.utils.data.DataLoader(names["FromDatasetPipe"].TaskDataset(dataset, [1, 3, 5]), batch_size=3)
    assert next(iter(loader))[0].tolist() == [1, 3, 5]
