"""Cross entropy of classes, and the evaluation of a classifier on a test set. Only calls import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.ops.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

#: Examples that are evaluated at once; limits the memory.
EVALUATION_BATCH = 1000


def class_labels(y: Any) -> Any:
    """Return labels as torch's cross entropy takes them: integers of any dtype, (n,) or (n, 1), as (n,) int64."""
    import torch

    if (y.dtype == torch.int64 and y.ndim == 1) or y.is_floating_point() or y.is_complex():
        return y
    return (y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y).long()


def class_loss(output: Any, y: Any) -> Any:
    """Return the mean cross entropy of outputs (n, classes) and labels; raise ValueError if these do not fit."""
    import torch

    try:
        loss = torch.nn.functional.cross_entropy(output, class_labels(y))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if not isinstance(output, torch.Tensor):
            kind = type(output).__name__
            raise ValueError(f"the model returns a {kind}, not a tensor of outputs: give loss=") from error
        kind = f" of dtype {str(y.dtype).removeprefix('torch.')}" if y.is_floating_point() else ""
        integers = " of an integer dtype" if kind else ""
        raise ValueError(
            f"the model's outputs are of shape {tuple(output.shape)} for labels from {y.min()} to {y.max()}{kind}: "
            "a classification needs outputs (examples, classes), and labels from 0 to classes - 1" + integers
        ) from error
    if output.ndim > 1 and output.shape[1] == 1:
        raise ValueError(
            "the model has one output for each example, with which cross entropy is always 0: give loss= for a "
            "regression, or an output for each class"
        )
    return loss


def add_note_on_examples(error: Exception, x: Any) -> None:
    """Add a note to an exception of a model that was called on x, if x is a usual cause of it."""
    leaves = list(x.values()) if isinstance(x, Mapping) else x if isinstance(x, tuple) else [x]
    if any(str(getattr(leaf, "dtype", "")) == "torch.uint8" for leaf in leaves):
        error.add_note("x holds uint8, as images do: give x.float() / 255, or the like")
    elif any(getattr(leaf, "shape", ())[:1] == (1,) for leaf in leaves):
        error.add_note("the batch has one example; drop_last=True leaves out an epoch's smaller last batch")


@dataclass(frozen=True, eq=False)
class Classification:
    """Accuracy and mean cross entropy over examples x with labels y, torch tensors."""

    x: Any
    y: Any

    def __call__(self, model: "nn.Module") -> tuple[float, float]:
        """Return accuracy and mean loss of the model; raise ConfigError if its outputs do not fit the labels."""
        import torch

        batches = (self.x[start : start + EVALUATION_BATCH] for start in range(0, len(self.y), EVALUATION_BATCH))
        device = next((parameter.device for parameter in model.parameters()), self.x.device)
        try:
            logits = torch.cat([model(batch.to(device)).to(self.y.device) for batch in batches])
        except Exception as error:
            add_note_on_examples(error, self.x)
            raise
        try:
            loss = class_loss(logits, self.y).item()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        correct = int((logits.argmax(dim=1) == self.y).sum())
        return correct / len(self.y), loss


def as_arrays(what: str, *columns: Any) -> list[Any]:
    """Return tensors as they are, and others as arrays; raise ConfigError if an array does not hold numbers."""
    import torch

    arrays = [own if isinstance(own, torch.Tensor) else np.asarray(own) for own in columns]
    for name, array in zip("xy", arrays, strict=True):
        if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
            raise ConfigError(f"{what}: {name} holds {array.dtype}, must hold numbers")
    return arrays


def refuse_nonfinite(what: str, x: Any) -> None:
    """Raise ConfigError if a row of an array or tensor has a value that is not finite; it names the row."""
    import torch

    if isinstance(x, torch.Tensor):
        # The sum needs no memory. It is not finite either if it overflows.
        finite = not x.is_floating_point() or bool(torch.isfinite(x.sum())) or torch.isfinite(x).numpy(force=True)
    else:
        values = np.asarray(x)
        with np.errstate(over="ignore", invalid="ignore"):
            finite = values.dtype.kind != "f" or bool(np.isfinite(values.sum())) or np.isfinite(values)
    if np.all(finite):
        return
    row = int(np.argmin(np.reshape(finite, (len(x), -1)).all(1)))
    raise ConfigError(f"{what}: example {row} of x has a value that is not finite")


def classification(x: Any, y: Any) -> Classification:
    """Return an evaluation function: accuracy and mean cross entropy of the model's logits.

    Args:
        x: (n, ...) the examples, an array or a torch tensor; float64 is converted to float32.
        y: (n,) or (n, 1), their labels: whole numbers from 0.

    Returns:
        A function for `Simulation` and `Task`.

    Raises:
        ConfigError: an example has a value that is not finite.
    """
    import torch

    refuse_nonfinite("classification", x)
    arrays = as_arrays("classification", x, y)
    examples, labels = (own if isinstance(own, torch.Tensor) else torch.as_tensor(np.array(own)) for own in arrays)
    # float64, which NumPy and scikit-learn give, in the precision of the params.
    return Classification(examples.float() if examples.dtype == torch.float64 else examples, class_labels(labels))
