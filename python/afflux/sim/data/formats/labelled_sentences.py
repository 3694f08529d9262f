"""Labelled sentences as GLUE publishes them: a line of column names, values separated by tabs, not quoted."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.files import read_text


@dataclass(frozen=True)
class Columns:
    """The columns that are read; others are ignored."""

    sentences: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    """The texts of the labels; the first is class 0."""


def read_sentences(path: Path, columns: Columns) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the sentences and the label of each line.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or a line has another number of values or another label.
    """
    names = (*columns.sentences, columns.label)
    expected = f"a table with tabs whose first line names the columns {', '.join(names)}"
    lines = read_text(path, expected, "utf-8-sig").split("\n")
    header = lines[0].rstrip("\r").split("\t")
    absent = [name for name in names if name not in header]
    if absent:
        raise bad_file(path, f"has no column {', '.join(absent)}", expected)
    places = [header.index(name) for name in columns.sentences]
    label = header.index(columns.label)
    for number, line in enumerate(lines[1:], start=2):
        values = line.rstrip("\r").split("\t")
        if values == [""]:
            continue
        if len(values) != len(header):
            raise bad_file(path, f"has {len(values)} values in line {number}", f"{len(header)}, as in its first line")
        if values[label] not in columns.labels:
            raise bad_file(path, f"has the label {values[label]!r} in line {number}", " or ".join(columns.labels))
        yield tuple(values[place] for place in places), columns.labels.index(values[label])
