"""Tasks of GLUE (RTE, MRPC, SST-2) from TSV files. The test part is dev.tsv, because GLUE's test labels are secret."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from afflux.sim.data.files import Layout, bad_file, read_first
from afflux.sim.data.formats import read_table


class Part(NamedTuple):
    """The examples of the training or the test part."""

    sentences: list[tuple[str, ...]]
    """One or two sentences of each example."""
    labels: np.ndarray
    """(n,) int64, from 0."""


class Source(NamedTuple):
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


def read_glue(name: str, data_dir: Path) -> tuple[Part, Part]:
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
    layout = Layout(folders, ("train.tsv", "dev.tsv"), lambda paths: (_part(paths[0], source), _part(paths[1], source)))
    return read_first(name, data_dir, [layout])


def _part(path: Path, source: Source) -> Part:
    sentences, labels = [], []
    for number, (*texts, label) in read_table(path, source.columns):
        if label not in source.labels:
            raise bad_file(path, f"has the label {label!r} in line {number}", " or ".join(source.labels))
        sentences.append(tuple(texts))
        labels.append(source.labels.index(label))
    if not labels:
        raise bad_file(path, "has no example", "a line for each example")
    return Part(sentences, np.array(labels, np.int64))
