"""Local training from a pulled model, on one torch module that all clients share."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from afflux.arrays.layout import Layout
from afflux.sim.clients import optimizers
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.data_sets import DataSet

#: Examples that are evaluated at once; limits the memory.
EVALUATION_BATCH = 1000


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Run torch on one thread in the block: the bits of a sum may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batch_indices(num_examples: int, batch_size: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield `steps` mini-batches of indices: shuffled epochs, one after the other.

    The last batch of an epoch may be smaller, so that each sample is seen once an epoch.
    """
    if num_examples < 1:
        raise ValueError("[batch_indices] there are no examples to draw from")
    done = 0
    while done < steps:
        order = rng.permutation(num_examples)
        for start in range(0, num_examples, batch_size):
            if done == steps:
                return
            yield order[start : start + batch_size]
            done += 1


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The result of one local training."""

    update: np.ndarray
    """(d,) local - pulled params."""
    num_examples: int
    loss: float
    steps: int
    """Number of local steps, K."""


class Trainer:
    """Trains for all clients, and evaluates.

    Parameters and gradients of the module are views into two flat buffers, so a pull is one copy
    and a local step is one axpy, whatever the number of layers.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        layout: Layout,
        data: DataSet,
        shards: Sequence[np.ndarray],
        config: SimConfig,
    ) -> None:
        """Bind `module` to flat buffers and divide the training data among the clients."""
        self._module = module
        self._config = config
        self._local = np.zeros(layout.size, dtype=np.float32)
        gradient = np.zeros(layout.size, dtype=np.float32)
        views = (layout.views(flat).values() for flat in (self._local, gradient))
        for parameter, own, gradient_view in zip(module.parameters(), *views, strict=True):
            parameter.data = torch.from_numpy(own)
            parameter.grad = torch.from_numpy(gradient_view)
        self._flat = torch.from_numpy(self._local)
        self._gradient = torch.from_numpy(gradient)
        self._train = x, y = torch.tensor(data.x_train), torch.tensor(data.y_train)
        self._data = [(x[shard], y[shard]) for shard in map(torch.from_numpy, shards)]
        self._test = torch.tensor(data.x_test), torch.tensor(data.y_test)

    def train(
        self,
        client: int,
        pulled: np.ndarray,
        rng: np.random.Generator,
        shift: np.ndarray | None = None,
    ) -> TrainingResult:
        """Run the local steps of a client.

        Args:
            client: the client.
            pulled: (d,) float32, the params from which it starts.
            rng: the dispatch's own stream, for the number of steps, if that is random, and then for the batches.
            shift: (d,) SCAFFOLD's c - c_i.

        Returns:
            The result.
        """
        config = self._config
        x, y = self._data[client]
        steps = self._steps(len(y), rng)
        terms = self._gradient_terms(pulled, shift)
        np.copyto(self._local, pulled)
        losses = 0.0
        seen = 0
        for batch in map(torch.from_numpy, batch_indices(len(y), config.batch_size, steps, rng)):
            losses += self._backward(x[batch], y[batch]) * len(batch)
            seen += len(batch)
            for term in terms:
                term(self._gradient, self._flat)
            self._flat.add_(self._gradient, alpha=-config.client_lr)
        update: np.ndarray = self._local - pulled
        examples = min(len(y), config.batch_size) if config.examples == "batch" else len(y)
        return TrainingResult(update, examples, losses / seen, steps)

    def gradient(self, params: np.ndarray, examples: np.ndarray) -> np.ndarray:
        """Return the mean gradient (d,) at `params` (d,) over these examples of the whole training part."""
        np.copyto(self._local, params)
        index = torch.from_numpy(examples)
        self._backward(self._train[0][index], self._train[1][index])
        return self._gradient.numpy().copy()

    def _steps(self, num_examples: int, rng: np.random.Generator) -> int:
        config = self._config
        if config.local_epochs:
            return config.local_epochs * math.ceil(num_examples / config.batch_size)
        if config.steps_law == "uniform":
            return int(rng.integers(1, 2 * config.local_steps, endpoint=True))
        return config.local_steps

    def _gradient_terms(self, pulled: np.ndarray, shift: np.ndarray | None) -> list[optimizers.GradientTerm]:
        config = self._config
        terms = [optimizers.weight_decay_term(config.weight_decay)] if config.weight_decay else []
        if config.client_optimizer in optimizers.PROXIMAL:
            terms.append(optimizers.proximal_term(config.mu, torch.tensor(pulled)))
        if shift is not None:
            terms.append(optimizers.shift_term(torch.from_numpy(shift)))
        return terms

    def _backward(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Fill the flat gradient with that of the mean loss over (x, y) at the local model; return the loss."""
        self._gradient.zero_()
        loss = cross_entropy(self._module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def evaluate(self, params: np.ndarray) -> tuple[float, float]:
        """Return accuracy and mean loss of `params` (d,) on the test part."""
        np.copyto(self._local, params)
        x, y = self._test
        with torch.inference_mode():
            starts = range(0, len(y), EVALUATION_BATCH)
            logits = torch.cat([self._module(x[start : start + EVALUATION_BATCH]) for start in starts])
            loss = cross_entropy(logits, y).item()
            correct = int((logits.argmax(dim=1) == y).sum())
        return correct / len(y), loss
