"""NumPy's archives of arrays, .npz."""

from pathlib import Path

import numpy as np

from afflux.sim.data.formats.errors import bad_file, readable


def read_npz(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """Read arrays from an archive. Arrays of Python objects are refused: they are pickles.

    Args:
        path: the file.
        names: the names of the arrays to read; other arrays in the archive are not read.

    Returns:
        The arrays, in the order of `names`.

    Raises:
        ConfigError: the file cannot be read, or an array is absent.
    """
    expected = f"an .npz archive with the arrays {', '.join(names)}"
    with readable(path, expected), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("a single array, no archive")
        with archive:
            absent = [name for name in names if name not in archive]
            if not absent:
                return [archive[name] for name in names]
    raise bad_file(path, f"has no array {', '.join(absent)}", expected)
