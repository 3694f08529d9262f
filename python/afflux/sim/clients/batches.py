"""The batches of a client's local training: which examples, and their tensors."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from afflux.ops.errors import ConfigError
from afflux.sim.workload.task import Batched

#: Names of the label, where the items of a data set are dicts.
LABELS = ("label", "labels")


def batch_indices(
    num_examples: int, batch_size: int, steps: int, rng: np.random.Generator, drop_last: bool = False
) -> Iterator[np.ndarray]:
    """Return `steps` mini-batches of indices: shuffled epochs, one after the other.

    The last batch of an epoch may be smaller, so that each sample is seen once an epoch; with `drop_last` such a batch
    is left out, unless it is the only one.
    """
    end = num_examples
    if drop_last and num_examples >= batch_size:
        end -= num_examples % batch_size
    epochs = (rng.permutation(num_examples) for _ in count())
    return islice((order[start : start + batch_size] for order in epochs for start in range(0, end, batch_size)), steps)


def take(data: Any, batch: np.ndarray) -> tuple[Any, torch.Tensor]:
    """Return (x, y) of these examples of a data set: a pair of arrays or trees of arrays, or a data set of items.

    An item is a pair (x, y), as in a torch Dataset, or a dict with a label, as in a Dataset of Hugging Face.

    Raises:
        ConfigError: the items are dicts without a label, or with values that are no numbers.
    """
    if isinstance(data, tuple) and len(data) == 2:
        index = torch.from_numpy(batch)
        x, y = data
        return single_precision(_rows(x, index)), _rows(y, index)
    if isinstance(data, Batched):
        return data.batch(batch.tolist())
    items = [data[place] for place in batch.tolist()]
    x, y = _columns(items) if isinstance(items[0], Mapping) else torch.utils.data.default_collate(items)
    return single_precision(x), y


def _columns(items: Sequence[Mapping[str, Any]]) -> tuple[Any, torch.Tensor]:
    """Return x, the columns of these items but the label, and y, the label; a single column is no mapping."""
    label = next((name for name in LABELS if name in items[0]), None)
    if label is None:
        raise ConfigError(f"the items of a client's data set are dicts with {', '.join(items[0])}, and without label")
    columns = {}
    for name in items[0]:
        values = [np.asarray(item[name]) if isinstance(item[name], list) else item[name] for item in items]
        try:
            columns[name] = torch.utils.data.default_collate(values)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"column {name} of a client's data set cannot be a batch: {error}") from None
        if not isinstance(columns[name], torch.Tensor):
            kind = type(values[0]).__name__
            raise ConfigError(f"column {name} of a client's data set holds {kind}, must hold numbers")
    y = columns.pop(label)
    return (columns if len(columns) > 1 else columns.popitem()[1]), y


def _rows(tree: Any, index: torch.Tensor) -> Any:
    if isinstance(tree, torch.Tensor):
        index = index.to(tree.device)
        # index_select takes a third of the time, but it does not keep another memory format.
        return tree.index_select(0, index) if tree.is_contiguous() else tree[index]
    if isinstance(tree, Mapping):
        return {name: _rows(array, index) for name, array in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_rows(array, index) for array in tree)
    return torch.as_tensor(np.asarray(tree)[index.numpy()])


def single_precision(tree: Any) -> Any:
    """Return examples of float64, as NumPy and scikit-learn give them, in float32, the precision of the params."""
    if isinstance(tree, torch.Tensor):
        return tree.float() if tree.dtype == torch.float64 else tree
    if isinstance(tree, Mapping):
        return {name: single_precision(array) for name, array in tree.items()}
    return tuple(map(single_precision, tree)) if isinstance(tree, tuple) else tree


def on_device(tree: Any, device: str) -> Any:
    """Return the tree with its tensors on a device."""
    return tree if device == "cpu" else tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), tree)


def gives_batches(data: Any) -> bool:
    """Return whether a data set is a pair of arrays or gives whole batches, in place of single items."""
    return isinstance(data, Batched) or (isinstance(data, tuple) and len(data) == 2)


def resident(data: Any, device: str) -> Any:
    """Return a client's data set in the memory of a device; as it is if it gives single items, or has no room there."""
    if not gives_batches(data) or not has_room(vars(data) if isinstance(data, Batched) else data, device):
        return data
    return data.to(device) if isinstance(data, Batched) else on_device(take(data, np.arange(len(data[1]))), device)


def has_room(tree: Any, device: str) -> bool:
    """Return whether half of a GPU's memory stays free beside the arrays of the tree; say it if not."""
    size = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(tree))
    free, total = torch.cuda.mem_get_info(device)
    if free - size >= total / 2:
        return True
    note_once(f"examples stay on the host, and are copied batch by batch: half of {device}'s memory is in use")
    return False


@cache
def note_once(text: str) -> None:
    """Print a note to stderr, once in each process."""
    print(text, file=sys.stderr, flush=True)


def call(module: Callable[..., Any], x: Any) -> Any:
    """Call a module with a batch: a tensor, or a tuple or mapping of arguments."""
    if isinstance(x, Mapping):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)
