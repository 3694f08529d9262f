"""Asynchronous federated learning with FLGo on handwritten digits, in FLGo's virtual time.

    pip install '.[flgo]' scikit-learn
    python examples/flgo/digits.py --rule ca2fl

The clients are FLGo's own; the algorithm is another one.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import flgo
from flgo.simulator.base import BasicSimulator

from afflux import rules
from afflux.integrations.flgo import algorithm

TASK = Path(__file__).with_name("digits_task.py")
RULES = {
    "fedbuff": rules.fedbuff(buffer_size=4),
    "ca2fl": rules.ca2fl(buffer_size=4),
    "fadas": rules.fadas(buffer_size=4, server_lr=0.02),
}
#: Of 10 clients, 6 train at a time.
OPTIONS = {"proportion": 0.6, "num_epochs": 5, "batch_size": 16, "learning_rate": 0.1, "no_tqdm": True}


class Latencies(BasicSimulator):
    """Some clients take ten times as long as others."""

    def initialize(self) -> None:
        """FLGo calls it before a run."""
        self.set_variable(self.all_clients, "latency", [5 + 5 * i for i in range(len(self.all_clients))])


def new_task(folder: Path) -> str:
    """FLGo's task in this folder: a benchmark of the digits, of which each client has few classes."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # FLGo imports the benchmark by its name
    if not Path("task").exists():
        benchmark = flgo.gen_benchmark_from_file("digits_benchmark", str(TASK), data_type="general")
        partition = {"name": "DiversityPartitioner", "para": {"num_clients": 10, "diversity": 0.3}}
        flgo.gen_task({"benchmark": {"name": benchmark}, "partitioner": partition}, "task")
    return "task"


def main(rule: str, rounds: int, folder: Path) -> None:
    task = new_task(folder)
    options = {**OPTIONS, "num_rounds": rounds, "eval_interval": 5}
    runner = flgo.init(task, algorithm(RULES[rule], store=folder / "store"), options, Simulator=Latencies)
    runner.run()
    accuracy = runner.gv.logger.output["test_accuracy"][-1]
    print(f"{rule}: accuracy {100 * accuracy:.1f} % after {rounds} rounds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, default="fedbuff")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="folder of task and state; a second run with it continues")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = (given.folder or Path(own)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        main(given.rule, given.rounds, folder)
