"""For tests with APPFL: the stand-ins of modules that it imports, a model, and an aggregator."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("appfl", reason="needs appfl: make test-integrations")

sys.path.append(str(Path(__file__).parent / "stubs"))  # last: what is installed comes first

import torch
from omegaconf import OmegaConf

from afflux.integrations.appfl import AffluxAggregator


class Net(torch.nn.Module):
    """A few numbers, from a seed."""

    def __init__(self, seed=0, statistics=False):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.w = torch.nn.Parameter(torch.randn(3, 4, generator=random))
        self.b = torch.nn.Parameter(torch.randn(5, generator=random))
        if statistics:
            self.norm = torch.nn.BatchNorm1d(4)
            self.register_buffer("scale", torch.full((2,), 0.5))
            self.register_buffer("unsaved", torch.zeros(3), persistent=False)


def moved(model, value):
    """The model, `value` added to each element that is no integer."""
    return {name: array + value if array.is_floating_point() else array + 1 for name, array in model.items()}


def flat(model):
    """All elements, one after the other."""
    return torch.cat([array.detach().double().reshape(-1) for array in model.values()]).numpy()


class Lines(list):
    """A logger."""

    info = list.append


def aggregator(model=None, logger=None, **configs):
    configs = {"K": 2, "num_clients": 4, **configs}
    return AffluxAggregator(model or Net(), OmegaConf.create(configs), logger)


def params(own):
    return own.server.params.tobytes()


def counted(own):
    return {name: count for name, count in own.counts.items() if count}
