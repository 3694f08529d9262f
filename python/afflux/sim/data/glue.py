"""Tasks of GLUE (RTE, MRPC, SST-2) from TSV files. The test part is dev.tsv, because GLUE's test labels are secret."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from afflux.sim.data.folder import Layout, read_first
from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.labelled_sentences import Columns, read_sentences
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
    columns: Columns


TASKS: Mapping[str, Source] = {
    "rte": Source("RTE", Columns(("sentence1", "sentence2"), "label", ("entailment", "not_entailment"))),
    "mrpc": Source("MRPC", Columns(("#1 String", "#2 String"), "Quality", ("0", "1"))),
    "sst2": Source("SST-2", Columns(("sentence",), "label", ("0", "1"))),
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
        train, test = (_part(path, source.columns) for path in paths)
        return SentenceSet(name, train, test, len(source.columns.labels))

    folders = (source.folder, f"glue/{source.folder}", f"GLUE/{source.folder}", name, f"glue/{name}")
    return read_first(name, data_dir, [Layout(folders, ("train.tsv", "dev.tsv"), read)])


def _part(path: Path, columns: Columns) -> Part:
    examples = list(read_sentences(path, columns))
    if not examples:
        raise bad_file(path, "has no example", "a line for each example")
    labels = np.array([label for _, label in examples], np.int64)
    labels.flags.writeable = False
    return Part(tuple(sentences for sentences, _ in examples), labels)
