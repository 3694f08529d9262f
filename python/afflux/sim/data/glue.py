"""Tasks of GLUE (RTE, MRPC, SST-2) from TSV files. The test part is dev.tsv, because GLUE's test labels are secret."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from afflux.sim.data.files import Layout, bad_file, read_first
from afflux.sim.data.formats import read_table
from afflux.sim.errors import known


@dataclass(frozen=True)
class Part:
    """The examples of the training or the test part."""

    sentences: tuple[tuple[str, ...], ...]
    """One or two sentences of each example."""
    labels: np.ndarray
    """(n,) int64, from 0."""


@dataclass(frozen=True)
class SentenceSet:
    """A classification task of sentences or pairs of sentences."""

    name: str
    train: Part
    test: Part
    num_classes: int


@dataclass(frozen=True)
class Source:
    """The folder of a task, and its columns."""

    folder: str
    columns: tuple[str, ...]
    """Those of the sentences, then that of the label."""
    labels: tuple[str, ...]
    """The texts of the labels; the first is class 0."""


TASKS: Mapping[str, Source] = {
    "rte": Source("RTE", ("sentence1", "sentence2", "label"), ("entailment", "not_entailment")),
    "mrpc": Source("MRPC", ("#1 String", "#2 String", "Quality"), ("0", "1")),
    "sst2": Source("SST-2", ("sentence", "label"), ("0", "1")),
}


@lru_cache(maxsize=2)
def read_glue(name: str, data_dir: Path) -> SentenceSet:
    """Read a task of GLUE from RTE/, MRPC/ or SST-2/ (or the same below glue/ or GLUE/): train.tsv and dev.tsv.

    Raises:
        ConfigError: an unknown name, no folder, or a file is missing or damaged.
    """
    known("data", name, TASKS)
    source = TASKS[name]

    def read(paths: list[Path]) -> SentenceSet:
        train, test = (_part(path, source) for path in paths)
        return SentenceSet(name, train, test, len(source.labels))

    folders = (source.folder, f"glue/{source.folder}", f"GLUE/{source.folder}", name, f"glue/{name}")
    return read_first(name, data_dir, [Layout(folders, ("train.tsv", "dev.tsv"), read)])


def _part(path: Path, source: Source) -> Part:
    sentences, labels = [], []
    for number, (*texts, label) in read_table(path, source.columns):
        if label not in source.labels:
            raise bad_file(path, f"has the label {label!r} in line {number}", " or ".join(source.labels))
        sentences.append(tuple(texts))
        labels.append(source.labels.index(label))
    if not labels:
        raise bad_file(path, "has no example", "a line for each example")
    classes = np.array(labels, np.int64)
    classes.flags.writeable = False
    return Part(tuple(sentences), classes)
