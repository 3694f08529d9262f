"""Cross entropy of classes, with errors that name what does not fit. Imports torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy


def class_labels(y: Any) -> Any:
    """Return labels as torch's cross entropy takes them: whole numbers of any dtype, (n,) or (n, 1), as (n,) int64."""
    if (y.dtype == torch.int64 and y.ndim == 1) or y.is_floating_point() or y.is_complex():
        return y
    return (y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y).long()


def class_loss(output: Any, y: Any) -> Any:
    """Return the mean cross entropy of outputs (n, classes) and labels; raise ValueError if these do not fit."""
    try:
        return cross_entropy(output, class_labels(y))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"the model returns a {type(output).__name__}, not a tensor of outputs: give loss="
            ) from error
        kind = f" of dtype {str(y.dtype).removeprefix('torch.')}" if y.is_floating_point() else ""
        raise ValueError(
            f"the model's outputs are of shape {tuple(output.shape)} for labels from {y.min()} to {y.max()}{kind}: "
            "a classification needs outputs (examples, classes), and labels from 0 to classes - 1"
        ) from error


def add_note_on_examples(error: Exception, x: Any) -> None:
    """Add a note to an exception of a model that was called on x, if x is a usual cause of it."""
    leaves = list(x.values()) if isinstance(x, Mapping) else x if isinstance(x, tuple) else [x]
    if any(str(getattr(leaf, "dtype", "")) == "torch.uint8" for leaf in leaves):
        error.add_note("x holds uint8, as images do: give x.float() / 255, or the like")
    elif any(getattr(leaf, "shape", ())[:1] == (1,) for leaf in leaves):
        error.add_note("the batch has one example; drop_last=True leaves out an epoch's smaller last batch")
