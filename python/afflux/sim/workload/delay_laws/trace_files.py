"""CSV files of measured traces: a line of column names, then a line of values for each device or interval."""

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path

from afflux.ops.validation import brief
from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.files import read_text
from afflux.sim.errors import ConfigError


def trace_path(file: str) -> Path:
    """Return the path of a trace: the given path if it exists, else below the folder AFFLUX_DATA.

    Raises:
        ConfigError: there is no such file.
    """
    folder = os.environ.get("AFFLUX_DATA")
    paths = [Path(file), *([Path(folder) / file] if folder else [])]
    for path in paths:
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long
            return path
    where = f" or in {folder}" if folder else "; AFFLUX_DATA is not set"
    raise ConfigError(f"there is no file {file}{where} (formats: docs/data.md)")


def read_columns(path: Path, names: Sequence[str], numbers: Sequence[str]) -> list[dict[str, str | float]]:
    """Read some columns of a CSV file.

    Args:
        path: the file, in UTF-8 or UTF-16, with commas, semicolons or tabs; values may be in double quotes.
        names: columns of text, and
        numbers: columns of numbers, finite and not negative; an empty value is 0.

    Returns:
        One dict for each line.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or a value is no such number.
    """
    expected = f"a CSV file with the columns {', '.join([*names, *numbers])}"
    text = read_text(path, expected, "utf-8-sig")
    lines_of_file = text.splitlines()
    delimiter = max(",;\t", key="".join(lines_of_file[:1]).count)
    reader = csv.DictReader(lines_of_file, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        absent = [column for column in (*names, *numbers) if column not in columns]
        if absent:
            its = f"only {brief(', '.join(columns))}" if columns else "it is empty"
            raise bad_file(path, f"has no column {', '.join(absent)}, {its}", expected)
        lines = []
        for line in reader:
            values: dict[str, str | float] = {column: (line[column] or "").strip() for column in names}
            for column in numbers:
                values[column] = _number(path, reader.line_num, column, line[column])
            lines.append(values)
    except csv.Error as error:
        raise bad_file(path, f"is no CSV file after line {reader.line_num}: {error}", expected) from None
    if not lines:
        raise bad_file(path, "has no line of values", expected)
    return lines


def _number(path: Path, line: int, column: str, text: str | None) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise bad_file(path, f"has {column} {text!r} in line {line}", "a finite number, 0 or more")
    return value
