"""Shakespeare's plays as a table of speeches (TSV), or as one file of plain text for each role."""

from collections.abc import Iterator
from pathlib import Path

from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.files import read_text

COLUMNS = ("play", "speaker", "text")


def read_table(path: Path) -> Iterator[tuple[str, str]]:
    """Yield role and speech of each line of a table.

    Args:
        path: a file in UTF-8 whose values are separated by tabs, not quoted. Its first line names the columns, among
            them play, speaker and text; a backslash and an n in a text stand for the end of a verse.

    Yields:
        The role, "PLAY: SPEAKER", and its speech, in the order of the file.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or a line has another number of values.
    """
    expected = f"a table with tabs whose first line names the columns {', '.join(COLUMNS)}"
    lines = read_text(path, expected).split("\n")
    header = lines[0].rstrip("\r").split("\t")
    absent = [column for column in COLUMNS if column not in header]
    if absent:
        raise bad_file(path, f"has no column {', '.join(absent)}", expected)
    play, speaker, text = (header.index(column) for column in COLUMNS)
    for number, line in enumerate(lines[1:], start=2):
        values = line.rstrip("\r").split("\t")
        if values == [""]:
            continue
        if len(values) != len(header):
            raise bad_file(path, f"has {len(values)} values in line {number}", f"{len(header)}, as in its first line")
        yield f"{values[play]}: {values[speaker]}", values[text].replace("\\n", "\n")


def read_roles(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield role and speech of each line of the files of a folder.

    Args:
        folder: with one file ROLE.txt for each role, in UTF-8, a speech on each line.

    Yields:
        The role, which is the file's name without .txt, and its speech; files in the order of their names.

    Raises:
        ConfigError: there is no file, or one cannot be read.
    """
    expected = "a file ROLE.txt for each role, with a speech on each line"
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise bad_file(folder, "has no file *.txt", expected)
    for path in paths:
        yield from ((path.stem, line) for line in read_text(path, expected).splitlines() if line.strip())
