"""NumPy's archives of arrays, .npz."""

from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np

from afflux.arrays.npy import array_of
from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.files import MOST_BYTES, open_file


def read_npz(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """Read arrays from an archive. Arrays of Python objects are refused: they are pickles.

    Args:
        path: the file.
        names: the names of the arrays to read; other arrays in the archive are not read.

    Returns:
        The arrays, read-only, in the order of `names`.

    Raises:
        ConfigError: the file cannot be read, an array is absent, or the arrays have more than `MOST_BYTES` bytes.
    """
    expected = f"an .npz archive with the arrays {', '.join(names)}"
    with open_file(path, expected) as file, ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        absent = [name for name in names if f"{name}.npy" not in members]
        if absent:
            raise bad_file(path, f"has no array {', '.join(absent)}", expected)
        arrays = [members[f"{name}.npy"] for name in names]
        size = sum(member.file_size for member in arrays)
        if size > MOST_BYTES:
            raise bad_file(path, f"has arrays of {size} bytes", f"at most {MOST_BYTES} bytes")
        # zipfile's other methods decompress without a limit.
        if any(member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for member in arrays):
            raise bad_file(path, "is compressed by another method than deflate", expected)
        contents = []
        for member in arrays:
            with archive.open(member) as content:
                contents.append(array_of(content.read(member.file_size)))
        return contents
