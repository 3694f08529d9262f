"""For tests with FLGo: runners of the task in flgo_points.py, and their models as vectors."""

import sys
from pathlib import Path

import pytest

import flgo_points as points
from flgo_points import OPTIONS, Latencies, flgo, torch


@pytest.fixture(scope="module", autouse=True)
def in_a_folder(tmp_path_factory):
    """FLGo finds tasks, and the modules of their benchmarks, by the working directory: one for all tests of a file."""
    folder = tmp_path_factory.mktemp("flgo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield


def started(chosen, clients=6, simulator=Latencies, model=None, **options):
    """A runner of an algorithm."""
    task = points.make_task(Path.cwd(), clients, f"of{clients}")
    return flgo.init(task, chosen, {**OPTIONS, **options}, model=model, Simulator=simulator)


def simulator(**attributes):
    return type("Simulator", (Latencies,), attributes)


def flat(model):
    return torch.cat([part.detach().reshape(-1) for part in model.state_dict().values()]).numpy()
