"""The metrics of a task, which its evaluation returns; cross entropy of classes, and the evaluation of a classifier.

Only calls import torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief

if TYPE_CHECKING:
    from torch import nn

#: Names that columns of tables, attributes of an evaluation and panels of figures have already.
_TAKEN = (
    *("rule", "seed", "arrivals", "version", "virtual_time", "client", "model", "score", "names", "count", "index"),
    *("staleness", "participation"),
)


class Metric(Struct, frozen=True, forbid_unknown_fields=True):
    """A number of an evaluation.

    Attributes:
        name: a word: the column in tables, and the attribute of an `Evaluation`.
        unit: shown behind the name; "%": the values are shares, shown in per cent.
        lower_is_better: whether small values are good, as of a loss.
        range: the least and the largest value, where the axes of figures end; None: the axis follows the data.

    Raises:
        ConfigError: a name or unit that cannot be shown, or no range.
    """

    name: str
    unit: str = ""
    lower_is_better: bool = False
    range: tuple[float | None, float | None] = (None, None)

    def __post_init__(self) -> None:
        name, unit = self.name, self.unit
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w{0,39}", name, re.ASCII)) or name in _TAKEN:
            raise ConfigError(f"the name of a metric is {brief(name)}, must be a word other than {', '.join(_TAKEN)}")
        if not (isinstance(unit, str) and unit.isprintable() and len(unit) <= 20):
            raise ConfigError(f"the unit of metric {name} is {brief(unit)}, must be a short text")
        try:
            low, high = self.bounds
            if not low < high:
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError(f"the range of metric {name} is {brief(self.range)}, must be (low, high)") from None

    @property
    def bounds(self) -> tuple[float, float]:
        """The range with infinite ends in place of None."""
        low, high = self.range
        return -inf if low is None else low, inf if high is None else high

    @property
    def is_share(self) -> bool:
        """Whether the values are shown in per cent."""
        return self.unit == "%"

    @property
    def words(self) -> str:
        """The name as text."""
        return self.name.replace("_", " ")

    def title(self, text: str = "{}") -> str:
        """Return a title, in which the name replaces {}, with the unit behind it."""
        return text.format(self.words) + (f", {self.unit}" if self.unit else "")

    def text(self, value: float, digits: str = "g", sign: str = "") -> str:
        """Return a value with its unit; `digits` is the format of a value in per cent, other values have four."""
        if self.is_share:
            return f"{100 * value:{sign}{digits}}%"
        return f"{value:{sign}.4g}" + (f" {self.unit}" if self.unit else "")

    def difference(self, value: float, sign: str = "") -> str:
        """Return a difference of values: of shares in points, with two digits; others have four, without the unit."""
        return f"{100 * value:{sign}.2f}" if self.is_share else f"{value:{sign}.4g}"

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as the target, or better."""
        return value <= target if self.lower_is_better else value >= target

    def is_in_unit(self, value: float) -> bool:
        """Return whether a value is in the range, or at most a hundredth of the range beyond; for a share that is
        [0, 1]. Other values have another unit: per cent, for example.
        """
        low, high = (0.0, 1.0) if self.is_share else self.bounds
        margin = (high - low) / 100
        return low - margin <= value <= high + margin

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values; nan counts only if there is nothing else."""
        return (min if self.lower_is_better else max)((x for x in values if not isnan(x)), default=nan)

    def shown(self, values: Iterable[float]) -> "Metric":
        """Return the metric with which tables show these values: values beyond [0, 1] are not shown in per cent."""
        if self.is_share and any(isfinite(value) and not 0 <= value <= 1 for value in values):
            return structs.replace(self, unit="", range=(None, None))
        return self


#: What `evaluate` returns if a task declares no metrics.
CLASSIFICATION = (Metric("accuracy", "%", range=(0.0, 1.0)), Metric("loss", lower_is_better=True, range=(0.0, None)))

#: Examples that are evaluated at once, on a CPU (the outputs of a layer stay in its caches) and on a GPU.
EVALUATION_BATCH, EVALUATION_BATCH_OF_GPU = 100, 1000


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

        device = next((parameter.device for parameter in model.parameters()), self.x.device)
        batches = self.x.split(EVALUATION_BATCH if device.type == "cpu" else EVALUATION_BATCH_OF_GPU)
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
