"""The files of a data set in the user's folder. Several layouts are possible; the first that exists is used."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from afflux.sim.data.formats.errors import PAGE
from afflux.sim.errors import ConfigError

Data = TypeVar("Data")


@dataclass(frozen=True)
class Layout(Generic[Data]):
    """One layout of a data set's files in a folder."""

    folders: tuple[str, ...]
    """Folders below the user's; any of them; "." is the user's own."""
    files: tuple[str, ...]
    """Files (or folders) that must all be there; alternatives of a name are separated by "|"."""
    read: Callable[[list[Path]], Data]
    """Reads these files."""

    @property
    def description(self) -> str:
        """The first folder and its files, as in the documentation."""
        folder = "" if self.folders[0] == "." else f"{self.folders[0]}/"
        names = [file.split("|")[0] for file in self.files]
        return folder + (names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}")

    def find(self, data_dir: Path) -> list[Path] | None:
        """Return the paths of the files; None if none of them exists. Raise ConfigError if only some exist."""
        for folder in self.folders:
            paths = [_existing(data_dir / folder, file) for file in self.files]
            if all(paths):
                return [path for path in paths if path]
            if any(paths):
                absent = [file.replace("|", " or ") for file, path in zip(self.files, paths, strict=True) if not path]
                raise ConfigError(f"{data_dir / folder} has no {', '.join(absent)} (folders: {PAGE})")
        return None


def _existing(folder: Path, alternatives: str) -> Path | None:
    paths = (folder / name for name in alternatives.split("|"))
    return next((path for path in paths if path.exists()), None)


def read_first(name: str, data_dir: Path, layouts: Sequence[Layout[Data]]) -> Data:
    """Read a data set in the first layout that the folder has.

    Args:
        name: of the data set, for errors.
        data_dir: the user's folder.
        layouts: the layouts, in the order in which they are tried.

    Raises:
        ConfigError: no layout exists, or a file is missing or damaged.
    """
    if not os.path.isdir(data_dir):  # Path.is_dir raises for a name that is too long
        raise ConfigError(f"data {name!r}: there is no folder {data_dir} (folders: {PAGE})")
    for layout in layouts:
        if (paths := layout.find(data_dir)) is not None:
            return layout.read(paths)
    looked_for = "; ".join(layout.description for layout in layouts)
    raise ConfigError(f"data {name!r}: {data_dir} has none of: {looked_for} (folders: {PAGE})")
