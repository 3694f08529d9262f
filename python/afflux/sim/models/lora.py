"""A transformer classifier from a local checkpoint folder, whose LoRA adapters are trained (extra `lora`)."""

import os
from collections.abc import Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.sim.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

EXTRA = ("transformers", "peft")


def require_lora() -> None:
    """Raise MissingExtraError unless the packages of the extra are installed."""
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        raise MissingExtraError(f"LoRA needs {', '.join(missing)}: pip install 'afflux[sim,lora]'")


def checkpoint_folder(name: str, data_dir: Path | None) -> Path:
    """Return the folder of a checkpoint: as given, or below the folder of the data.

    Raises:
        ConfigError: there is no such folder with a config.json. Nothing is downloaded.
    """
    for folder in (Path(name), *([data_dir / name] if data_dir else [])):
        if os.path.isfile(folder / "config.json"):
            return folder
    where = f" or {data_dir}" if data_dir else ""
    raise ConfigError(
        f"checkpoint {name!r}: there is no folder of this name in the current folder{where} with a config.json; "
        "nothing is downloaded (docs/papers.md)"
    )


def encode(folder: Path, sentences: Sequence[tuple[str, ...]], length: int) -> np.ndarray:
    """Return the inputs of the model, (n, inputs, length) int64, in the order of the tokenizer's `model_input_names`.

    Args:
        folder: checkpoint with the files of its tokenizer.
        sentences: one or two of each example.
        length: in tokens; longer texts are cut, shorter ones padded.
    """
    tokenizer = _tokenizer(folder)
    columns = [list(column) for column in zip(*sentences, strict=True)]
    found = tokenizer(*columns, truncation=True, max_length=length, padding="max_length", return_tensors="np")
    return np.stack([np.asarray(found[name], np.int64) for name in tokenizer.model_input_names], axis=1)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with _checkpoint_errors(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def lora_classifier(folder: Path, num_classes: int, rank: int, scale: float, head: bool) -> "nn.Module":
    """Return the classifier with adapters; all other parameters are frozen.

    Adapters are those that peft places by default: in BERT at the query and value projections. torch's random numbers
    give their initial values, and those of the classification layer, if the checkpoint has none.

    Args:
        folder: checkpoint with weights as safetensors; pickled weights are refused.
        num_classes: outputs.
        rank: r of the adapters.
        scale: factor of the adapters' product, alpha_LoRA of FADAS; peft's lora_alpha is rank times as much.
        head: whether the classification layer is trained, too.

    Raises:
        ConfigError: the checkpoint cannot be read, or peft does not support its kind of model.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from torch import float32
    from transformers import AutoModelForSequenceClassification

    with _checkpoint_errors(folder):
        base = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=num_classes,
            dtype=float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=scale * rank, lora_dropout=0.0)
        model = get_peft_model(base, adapters)
    if not head:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    return _module(model, _tokenizer(folder).model_input_names)


def _module(model: "nn.Module", names: Sequence[str]) -> "nn.Module":
    from torch import Tensor, nn

    class Logits(nn.Module):
        """A classifier that takes one tensor (n, inputs, length) of inputs, and returns the scores of the classes."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.model(**dict(zip(names, inputs.unbind(1), strict=True))).logits
            return logits

    return Logits()


@contextmanager
def _checkpoint_errors(folder: Path) -> "Iterator[None]":
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"checkpoint {folder} cannot be read: {type(error).__name__}: {first}") from None
