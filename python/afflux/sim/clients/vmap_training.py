"""Local trainings of several clients in one call of `torch.func.vmap`, on any device of torch."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from afflux.arrays.fields import from_words, to_words
from afflux.sim.clients.flat_model import FlatModel
from afflux.sim.clients.training import LocalPlan, Trainer, TrainingResult, take
from afflux.sim.errors import ConfigError

Rows = slice | torch.Tensor
"""Rows of a matrix with one row for each client: a slice, or the indices of some rows."""


class Start(NamedTuple):
    """The arguments of one training; see `Trainer.train`."""

    client: int
    pulled: np.ndarray
    rng: np.random.Generator
    shift: np.ndarray | None = None
    buffers: np.ndarray | None = None


class _Local(NamedTuple):
    """The data of one client on the device, in the order of its steps, and the range of each batch."""

    plan: LocalPlan
    examples: Any
    places: list[slice]


class VmapTrainer:
    """A trainer of groups of clients, with the same batches, losses and optimizers as `Trainer`, but not the same bits.

    A step of the group is one call of `torch.func.vmap` for each shape of its batches: a single call, while all batches
    are full. The group needs 12 d bytes for each client (params, pulled params and gradients), and the memory of the
    model for all batches of one step.
    """

    def __init__(self, model: FlatModel, trainer: Trainer, device: torch.device) -> None:
        """Make a trainer on `device`, with a copy of the module.

        Raises:
            ConfigError: the task has a training function of its own, or the device cannot be used.
        """
        if trainer.training is not None:
            raise ConfigError("the task has a training function of its own, which vmap cannot call for many clients")
        self._model, self._trainer, self._device = model, trainer, device
        try:
            self._module = copy.deepcopy(model.module).requires_grad_(False).to(device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device {device} cannot be used: {error}") from error
        own = {field.name for field in (*model.layout.buffers, *model.layout.copied)}
        self._fixed = {name: tensor for name, tensor in self._module.named_buffers() if name not in own}
        self._gradients = vmap(grad_and_value(self._loss), randomness="different")

    def _loss(self, params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], x: Any, y: Any) -> torch.Tensor:
        if isinstance(x, dict):
            output = functional_call(self._module, (params, buffers), kwargs=x)
        else:
            output = functional_call(self._module, (params, buffers), x)
        return self._trainer.loss(output, y)

    def train(self, starts: Sequence[Start]) -> list[TrainingResult]:
        """Train each client from its own pulled params.

        Returns:
            The results in the order of `starts`.

        Raises:
            ConfigError: vmap refuses the model, the loss or the data, or the device has too little memory.
        """
        clients = ", ".join(str(start.client) for start in starts)
        try:
            return self._train(starts)
        except RuntimeError as error:
            raise ConfigError(f"clients {clients} cannot be trained by torch.func.vmap: {error}") from error
        except Exception as error:
            error.add_note(f"while clients {clients} trained")
            raise

    def _train(self, starts: Sequence[Start]) -> list[TrainingResult]:
        trainer, rate = self._trainer, self._trainer.config.client_lr
        locals_ = self._load(starts)
        pulled = self._on_device([start.pulled for start in starts])
        shifts = [start.shift for start in starts if start.shift is not None]
        terms = trainer.gradient_terms(pulled, self._on_device(shifts) if shifts else None)
        params, gradients, buffers = pulled.clone(), torch.zeros_like(pulled), self._buffers(starts)
        losses = torch.zeros(len(starts), device=self._device)
        for step in range(max(local.plan.steps for local in locals_)):
            groups = _alike(locals_, step)
            for members in groups:
                rows = self._rows(members, len(starts))
                losses[rows] += self._step(locals_, members, step, params[rows], gradients, buffers, rows)
            for term in terms:
                term(gradients, params)
            active = self._rows(sorted(member for group in groups for member in group), len(starts))
            if isinstance(active, slice):
                params.add_(gradients, alpha=-rate)
            else:
                params.index_add_(0, active, gradients[active], alpha=-rate)
        return self._results(locals_, params.sub_(pulled), losses, buffers)

    def _load(self, starts: Sequence[Start]) -> list[_Local]:
        """Draw all batches, as `Trainer` does, and copy their examples to the device."""
        loaded: list[_Local] = []
        for start in starts:
            if self._trainer.seeds_torch:
                seed = int(start.rng.integers(2**63))
                if not loaded:  # a step draws its random numbers, such as dropout's, for the whole group
                    torch.manual_seed(seed)
            data = self._trainer.data[start.client]
            plan = self._trainer.plan(data, start.rng)
            batches = list(plan.batches)
            ends = np.cumsum([len(batch) for batch in batches]).tolist()
            places = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
            examples = tree_map(lambda leaf: leaf.to(self._device), take(data, np.concatenate(batches)))
            loaded.append(_Local(plan, examples, places))
        return loaded

    def _step(
        self,
        locals_: list[_Local],
        members: list[int],
        step: int,
        params: torch.Tensor,
        gradients: torch.Tensor,
        buffers: dict[str, torch.Tensor],
        rows: Rows,
    ) -> torch.Tensor:
        """Write the gradients of one step into their rows; return the sum of the losses of each client's examples."""
        fields, count = self._model.layout.fields, len(members)
        place = [locals_[member].places[step] for member in members]
        batches = [
            tree_map(lambda leaf, own=own: leaf[own], locals_[member].examples)
            for member, own in zip(members, place, strict=True)
        ]
        x, y = tree_map(lambda *leaves: torch.stack(leaves), *batches)
        own = {name: tensor[rows] for name, tensor in buffers.items()}
        named = {field.name: params[:, field.start : field.stop].view(count, *field.shape) for field in fields}
        slopes, means = self._gradients(named, own, x, y)
        gradients[rows] = torch.cat([slopes[field.name].reshape(count, -1) for field in fields], 1)
        if not isinstance(rows, slice):
            for name, tensor in own.items():
                buffers[name][rows] = tensor
        return means.detach() * (place[0].stop - place[0].start)  # type: ignore[no-any-return]

    def _rows(self, members: list[int], count: int) -> Rows:
        return slice(None) if len(members) == count else torch.tensor(members, device=self._device)

    def _on_device(self, vectors: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(vectors)).to(self._device)

    def _buffers(self, starts: Sequence[Start]) -> dict[str, torch.Tensor]:
        """Return each buffer of the module, for each client.

        Buffers of the layout have the pulled values; all others have the values of the module.
        """
        buffers = {name: tensor.expand(len(starts), *tensor.shape).clone() for name, tensor in self._fixed.items()}
        pulled = [start.buffers for start in starts if start.buffers is not None]
        for field in self._model.layout.buffers:
            kind = self._module.get_buffer(field.name)
            values = torch.from_numpy(np.stack(pulled))[:, field.start : field.stop]
            values = values if kind.is_floating_point() else values.round()
            buffers[field.name] = values.reshape(len(starts), *field.shape).to(kind)
        for field in self._model.layout.copied:
            rows = [torch.from_numpy(from_words(field, own)) for own in pulled]
            buffers[field.name] = torch.stack(rows).to(self._module.get_buffer(field.name))
        return buffers

    def _results(
        self, locals_: list[_Local], updates: torch.Tensor, losses: torch.Tensor, buffers: dict[str, torch.Tensor]
    ) -> list[TrainingResult]:
        fields, count = self._model.layout.buffers, len(locals_)
        on_host, sums = updates.cpu().numpy(), losses.tolist()
        trained: Any = [None] * count
        copied = self._model.layout.copied
        if fields or copied:
            columns = [buffers[field.name].reshape(count, -1).to("cpu", torch.float64) for field in fields]
            for field in copied:
                rows = [torch.from_numpy(to_words(field, own)) for own in buffers[field.name]]
                columns.append(torch.stack(rows))
            trained = torch.cat(columns, 1).numpy()
        return [
            TrainingResult(
                on_host[place],
                local.plan.examples,
                sums[place] / local.places[-1].stop,
                local.plan.steps,
                trained[place],
            )
            for place, local in enumerate(locals_)
        ]


def _alike(locals_: list[_Local], step: int) -> list[list[int]]:
    """Return the clients that make this step, in groups whose batches have the same shapes."""
    groups: dict[Any, list[int]] = {}
    for member, local in enumerate(locals_):
        if step < local.plan.steps:
            place = local.places[step]
            shapes = tuple(leaf.shape[1:] for leaf in tree_leaves(local.examples))
            groups.setdefault((place.stop - place.start, shapes), []).append(member)
    return list(groups.values())
