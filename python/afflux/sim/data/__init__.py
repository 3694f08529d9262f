"""The papers' data sets, read from a folder of the user; nothing is downloaded (docs/reference/data.md)."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from afflux.ops.validation import known
from afflux.sim.data import image_set
from afflux.sim.data.files import FileLayout, data_folder, read_first

DIGITS = "digits"
#: The data sets of the setting `data`.
DATA_SETS = (DIGITS, *image_set.LAYOUTS)
#: Layouts of the files, or MODULE:NAME of them; `afflux.lab` adds data sets whose examples have owners.
LAYOUTS: dict[str, Sequence[FileLayout[Any]] | str] = {**image_set.LAYOUTS}


def read_data_set(name: str, data_dir: Path | str | None = None) -> Any:
    """Read a data set, once per process and folder.

    Args:
        name: digits, or one of `LAYOUTS`.
        data_dir: the folder; None: that of the environment variable AFFLUX_DATA. scikit-learn has the digits.

    Returns:
        An `ImageSet`; of a data set that was added, what the layout reads.

    Raises:
        ConfigError: an unknown name, no folder, no file of the data set in it, or a damaged file.
        MissingExtraError: scikit-learn is not installed.
    """
    known("data", name, (DIGITS, *LAYOUTS))
    return _read(name, None if name == DIGITS else data_folder(name, data_dir))


@lru_cache(maxsize=2)
def _read(name: str, data_dir: Path | None) -> Any:
    if data_dir is None:
        return image_set.read_digits()
    layouts = LAYOUTS[name]
    return read_first(name, data_dir, resolve_name(layouts) if isinstance(layouts, str) else layouts)
