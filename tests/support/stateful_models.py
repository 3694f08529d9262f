"""Models with state of every kind, in a module of their own: worker processes import it.

The state depends on the data and changes the outputs, so that state that is lost or carried on changes the params, too.
"""

import random
from collections import deque

import numpy as np
import torch
from torch import nn

from own_tasks import CLASSES, FEATURES


class Counter(nn.Module):
    """Puts another tensor in the place of its buffer: an integer that grows by 1."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.n = self.n + 1
        return x * (1 + self.n / 64)


class Normaliser(nn.Module):
    """Puts another tensor in the place of its buffer: a moving mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Codebook(nn.Module):
    """Changes its buffer in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.ones(2, FEATURES))

    def forward(self, x):
        if self.training:
            self.codes.mul_(0.75).add_(x.detach()[:2], alpha=0.25)
        return x + 0.125 * self.codes.sum(0)


class Table(nn.Module):
    """Fills a table at its first forward, lengthens it when needed, and remembers its length in plain attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.length, self.calls = 1, 0

    def forward(self, x):
        self.calls += 1
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("table", torch.linspace(1, 1.5, self.length), persistent=False)
            self.register_buffer("square", self.table**2, persistent=False)
        # The outputs would change if calls of other clients counted.
        return x * self.table[: len(x), None] + min(self.calls, 32) / 256


class Shared(nn.Module):
    """Has one module in two places, and one buffer in two modules."""

    def __init__(self):
        super().__init__()
        self.first = self.second = Normaliser()
        self.one, self.other = Codebook(), Codebook()
        self.other.codes = self.one.codes

    def forward(self, x):
        return self.other(self.one(self.second(self.first(x))))


class Frozen(nn.Module):
    """Has a part that is not trained, whose statistics stay."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.BatchNorm1d(FEATURES).requires_grad_(False)
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x):
        return self.norm(self.frozen(x))


class Attributes(nn.Module):
    """Changes what is no parameter and no buffer in place: arrays, lists, dicts, and a module in a list."""

    def __init__(self):
        super().__init__()
        self.mean, self.total = torch.zeros(FEATURES), np.zeros(1)
        self.sizes, self.sums, self.last = [], {}, (deque([1.0], maxlen=2), set())
        self.hidden = [nn.BatchNorm1d(FEATURES)]

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.25)
            self.total += len(x)
            self.sizes.append(len(x))
            self.sums.setdefault("x", torch.zeros(FEATURES)).add_(self.mean)
            self.last[0].append(len(self.sizes) / 8)
            self.last[1].add(len(self.last[1]))
            self.register_forward_hook(lambda module, inputs, output: output * 1.0625)
        scale = 1 + (self.total[0] + sum(self.sizes) + sum(self.last[0]) + len(self.last[1])) / 256
        return self.hidden[0](x) * scale - self.mean - self.sums.get("x", 0) / 64


def plain_norm():
    """Statistics of a module without parameters."""
    return nn.BatchNorm1d(FEATURES, affine=False)


class Root(nn.Module):
    """The model: a kind of state, a buffer of its own, and the trained part."""

    def __init__(self, *kinds):
        super().__init__()
        self.kinds = nn.Sequential(*(kind() for kind in kinds))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + len(x)
        return self.head(self.kinds(x))


KINDS = {
    "rebound integer": (Counter,),
    "rebound mean": (Normaliser,),
    "in place": (Codebook,),
    "grown": (Table,),
    "shared": (Shared,),
    "frozen": (Frozen,),
    "attributes": (Attributes,),
    "without parameters": (plain_norm,),
    "everything": (Counter, Normaliser, Codebook, Table, Shared, Frozen, plain_norm, Attributes),
}


def _maker(kind):
    def make():
        return Root(*KINDS[kind])

    make.__name__ = make.__qualname__ = f"make_{kind.replace(' ', '_')}"
    globals()[make.__name__] = make
    return make


MODELS = {kind: _maker(kind) for kind in KINDS}


class Noisy(torch.utils.data.Dataset):
    """Examples that draw from the generators that all code shares, when they are made and when they are read."""

    def __init__(self):
        self.shift = np.random.standard_normal() + random.random()  # noqa: NPY002

    def __len__(self):
        return 8

    def __getitem__(self, place):
        x = torch.full((FEATURES,), place + self.shift + random.random())
        noise = np.random.standard_normal(FEATURES)  # noqa: NPY002
        return x + torch.from_numpy(noise).float(), place % CLASSES


def noisy(client):
    return Noisy()


def noisy_evaluation(model):
    accuracy = np.random.random()  # noqa: NPY002
    return accuracy, random.random() + float(next(model.parameters()).detach().sum())
