"""FADAS's Table 6: LoRA adapters of a transformer classifier, on a task of GLUE (docs/reference/presets.md).

The classifier comes from a local checkpoint folder; its packages are the extra `lora`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.ops.validation import known
from afflux.sim.data.files import FileLayout, bad_file, data_folder, read_first, read_table
from afflux.sim.errors import MissingExtraError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Partitioned, Task

if TYPE_CHECKING:
    from torch import nn


class Sentences(NamedTuple):
    """The examples of the training or the test part."""

    sentences: list[tuple[str, ...]]  #: One or two sentences of each example.
    labels: np.ndarray  #: (n,) int64, from 0.


class Source(NamedTuple):
    """The folder of a task, and its columns."""

    folder: str
    columns: tuple[str, ...]  #: Those of the sentences, then the one of the label.
    labels: tuple[str, ...]  #: The texts of the labels; the first is class 0.


TASKS: Mapping[str, Source] = {
    "rte": Source("RTE", ("sentence1", "sentence2", "label"), ("entailment", "not_entailment")),
    "mrpc": Source("MRPC", ("#1 String", "#2 String", "Quality"), ("0", "1")),
    "sst2": Source("SST-2", ("sentence", "label"), ("0", "1")),
}


def read_glue(name: str, data_dir: Path) -> tuple[Sentences, Sentences]:
    """Read a task of GLUE from RTE/, MRPC/ or SST-2/ (or the same below glue/ or GLUE/): train.tsv and dev.tsv.

    Args:
        name: one of `TASKS`.
        data_dir: the user's folder.

    Returns:
        The training and the test part.

    Raises:
        ConfigError: no folder, or a file is missing or damaged.
    """
    source = TASKS[name]
    folders = (source.folder, f"glue/{source.folder}", f"GLUE/{source.folder}", name, f"glue/{name}")
    layout = FileLayout(
        folders, ("train.tsv", "dev.tsv"), lambda paths: (_part(paths[0], source), _part(paths[1], source))
    )
    return read_first(name, data_dir, [layout])


def _part(path: Path, source: Source) -> Sentences:
    sentences, labels = [], []
    for number, (*texts, label) in read_table(path, source.columns):
        if label not in source.labels:
            raise bad_file(path, f"has the label {label!r} in line {number}", " or ".join(source.labels))
        sentences.append(tuple(texts))
        labels.append(source.labels.index(label))
    if not labels:
        raise bad_file(path, "has no example", "a line for each example")
    return Sentences(sentences, np.array(labels, np.int64))


#: Nothing is downloaded, and no code of a checkpoint runs.
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def lora_task(
    settings: SimConfig,
    dataset: str = "rte",
    checkpoint: str = "bert-base-uncased",
    rank: int = 1,
    scale: float = 8.0,
    length: int = 128,
    head: bool = False,
) -> Task:
    """Return the task of a data set and a checkpoint; only the adapters are trained, pushed and aggregated.

    The training part is divided among `num_clients` clients by the partition of the settings.

    Args:
        settings: data_dir, num_clients, partition, alpha and classes.
        dataset: rte, mrpc or sst2.
        checkpoint: folder of the model and its tokenizer, as given or below data_dir.
        rank: r of the adapters.
        scale: alpha_LoRA, the factor of the adapters' product.
        length: tokens of an example.
        head: whether the classification layer is trained and pushed, too.

    Raises:
        ConfigError: no or damaged files, or options out of range.
        MissingExtraError: transformers or peft is not installed.
    """
    if missing := [name for name in ("transformers", "peft") if find_spec(name) is None]:
        raise MissingExtraError(f"LoRA needs {', '.join(missing)}: pip install 'afflux[lab,lora]'")
    for name, value in (("rank", rank), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"scale is {scale}, must be positive and finite")
    known("data", dataset, TASKS)
    data_dir = data_folder(dataset, settings.data_dir)
    parts = read_glue(dataset, data_dir)
    folder = checkpoint_folder(checkpoint, data_dir)

    import torch

    def model() -> "nn.Module":
        return _classifier(folder, len(TASKS[dataset].labels), rank, scale, head)

    x_train, x_test = (torch.from_numpy(_encode(folder, part.sentences, length)) for part in parts)
    y_train, y_test = (torch.from_numpy(part.labels) for part in parts)
    clients = Partitioned(x_train, y_train, settings.num_clients, settings.partition, settings.heterogeneity)
    return Task(model, clients, Classification(x_test, y_test), validation=(x_train, y_train))


def checkpoint_folder(name: str, data_dir: Path) -> Path:
    """Return the folder of a checkpoint: as given, or below the folder of the data.

    Raises:
        ConfigError: there is no such folder with a config.json. Nothing is downloaded.
    """
    for folder in (Path(name), data_dir / name):
        if os.path.isfile(folder / "config.json"):
            return folder
    raise ConfigError(
        f"checkpoint {name!r}: there is no folder of this name in the current folder or {data_dir} with a config.json; "
        "nothing is downloaded (docs/reference/presets.md)"
    )


def _encode(folder: Path, sentences: Sequence[tuple[str, ...]], length: int) -> np.ndarray:
    """Return the inputs of the model, (n, inputs, length) int64, in the order of the tokenizer's `model_input_names`.

    Args:
        folder: checkpoint with the files of its tokenizer.
        sentences: one or two of each example.
        length: in tokens; longer texts are cut, shorter ones padded.
    """
    tokenizer = _tokenizer(folder)
    columns = [list(column) for column in zip(*sentences, strict=True)]
    tokens = tokenizer(*columns, truncation=True, max_length=length, padding="max_length", return_tensors="np")
    return np.stack([np.asarray(tokens[name], np.int64) for name in tokenizer.model_input_names], axis=1)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with _checkpoint_errors(folder):
        return AutoTokenizer.from_pretrained(folder, **LOCAL)


def _classifier(folder: Path, num_classes: int, rank: int, scale: float, head: bool) -> "nn.Module":
    """Return the classifier with adapters; all other parameters are frozen.

    It takes one tensor (n, inputs, length), and returns the scores of the classes. Adapters are those that peft places
    by default: in BERT at the query and value projections. torch's random numbers give their initial values, and those
    of the classification layer, if the checkpoint has none.

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
    from torch import Tensor, float32, nn
    from transformers import AutoModelForSequenceClassification

    with _checkpoint_errors(folder):
        base = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=num_classes, dtype=float32, use_safetensors=True, **LOCAL
        )
        adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=scale * rank, lora_dropout=0.0)
        model = get_peft_model(base, adapters)
    if not head:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    names = _tokenizer(folder).model_input_names

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.model(**dict(zip(names, inputs.unbind(1), strict=True))).logits
            return logits

    return Logits()


@contextmanager
def _checkpoint_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"checkpoint {folder} cannot be read: {type(error).__name__}: {first}") from None
