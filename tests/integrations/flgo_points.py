"""A task of FLGo's for tests: each client pulls the model toward a point of its own, elementwise and without chance.

The configuration is what `flgo.gen_benchmark_from_file` takes; `make_task` makes the task.
"""

import os
import sys
import warnings

import pytest

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import flgo
        import flgo.algorithm.fedbuff
        import flgo.benchmark.partition
        import torch
        from flgo.simulator.base import BasicSimulator
except ImportError as missing:
    pytest.skip(f"needs flgo: make test-integrations ({missing})", allow_module_level=True)

SIZE, MOST = 17, 16
_points = torch.linspace(-3.0, 4.0, MOST * SIZE).reshape(MOST, SIZE)
#: Rows in an order that has no pattern.
train_data = torch.utils.data.TensorDataset(_points[:, torch.tensor([(7 * i) % SIZE for i in range(SIZE)])])
test_data = torch.utils.data.TensorDataset(torch.zeros(2, SIZE))


class Point(torch.nn.Module):
    """Two arrays, SIZE elements."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3, 4), 0.25))
        self.b = torch.nn.Parameter(torch.full((5,), -0.5))

    def forward(self, x):
        return torch.cat([self.w.reshape(-1), self.b]) - x.mean(0)


def get_model():
    return Point()


def data_to_device(batch, device):
    return [part.to(device) for part in batch]


def compute_loss(model, batch, device):
    """Half the squared distance: its gradient is model - point, exact but for one rounding."""
    return {"loss": 0.5 * model(batch[0]).square().sum()}


def eval(model, loader, device):
    return {"distance": float(model(next(iter(loader))[0]).square().sum())}


class Rows(flgo.benchmark.partition.BasicPartitioner):
    """Client i has row i."""

    def __init__(self, num_clients):
        self.num_clients = num_clients

    def __call__(self, data):
        return [[i] for i in range(self.num_clients)]


class Latencies(BasicSimulator):
    """Client i takes `latencies[i]`, and longer if another package would arrive at the same time."""

    latencies = (5, 9, 4, 14, 7, 3, 11, 6)
    drops = ()  #: clients that always drop out
    apart = True

    def initialize(self):
        self.taken = set()
        for client in self.all_clients:
            self.set_variable(client, "latency", self.latencies[client % len(self.latencies)])
        self.set_variable(list(self.drops), "prob_drop", [1.0] * len(self.drops))
        self.server.set_tolerance_for_latency(1000)

    def update_client_responsiveness(self, client_ids):
        for client in client_ids:
            at = self.gv.clock.current_time + self.latencies[client % len(self.latencies)]
            while self.apart and at in self.taken:
                at += 1
            self.taken.add(at)
            self.set_variable([client], "latency", [at - self.gv.clock.current_time])


OPTIONS = {"proportion": 1.0, "num_steps": 1, "batch_size": 1, "learning_rate": 0.2, "train_holdout": 0.0}
OPTIONS |= {"no_tqdm": True, "no_log_console": True, "num_rounds": 6}


def make_task(folder, num_clients, name="task"):
    """The path of a task of these clients in this folder, which becomes the working directory."""
    os.chdir(folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    benchmark = "flgo_points_benchmark"
    if not (folder / benchmark).exists():
        flgo.gen_benchmark_from_file(benchmark, __file__, data_type="general")
    if not (folder / name).exists():
        flgo.gen_task({"benchmark": {"name": benchmark}, "partitioner": Rows(num_clients)}, name)
    return str(folder / name)
