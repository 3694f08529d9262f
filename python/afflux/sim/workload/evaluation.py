"""Evaluation of a classifier on a test set."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.sim.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

#: Examples that are evaluated at once; limits the memory.
EVALUATION_BATCH = 1000


@dataclass(frozen=True, eq=False)
class Classification:
    """Accuracy and mean cross entropy over examples x with labels y, torch tensors."""

    x: Any
    y: Any

    def __call__(self, model: "nn.Module") -> tuple[float, float]:
        """Return accuracy and mean loss of the model; raise ConfigError if its outputs do not fit the labels."""
        import torch

        from afflux.sim.workload.class_loss import add_note_on_examples, class_loss

        device = next((parameter.device for parameter in model.parameters()), self.x.device)
        batches = (self.x[start : start + EVALUATION_BATCH] for start in range(0, len(self.y), EVALUATION_BATCH))
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

    from afflux.sim.workload.class_loss import class_labels

    refuse_nonfinite("classification", x)

    examples, labels = (own if isinstance(own, torch.Tensor) else torch.as_tensor(np.array(own)) for own in (x, y))
    # float64, which NumPy and scikit-learn give, in the precision of the params.
    return Classification(examples.float() if examples.dtype == torch.float64 else examples, class_labels(labels))
