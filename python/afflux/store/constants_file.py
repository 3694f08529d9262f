"""The file of a store with the constants and local arrays of the model, which is written once."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from afflux.arrays.constants import Constants
from afflux.arrays.layout import Layout
from afflux.ops import crc32c
from afflux.ops.errors import StoreError
from afflux.store.files import read_bytes, write_new

#: The file, in the folder of a store whose model has such arrays: their bytes, then their CRC-32C.
CONSTANTS = "constants.bin"


def write_constants(path: Path, constants: npt.NDArray[np.uint8]) -> None:
    """Write the result of `Constants.to_bytes` into the folder of a new store."""
    write_new(path / CONSTANTS, constants.tobytes() + crc32c(constants, constants.size))


def constants_of(path: Path, layout: Layout | None) -> Constants:
    """Return the constants and local arrays of a store whose layout is `layout`.

    Raises:
        StoreError: the file is missing or damaged.
    """
    constants = Constants() if layout is None else Constants((*layout.constants, *layout.locals))
    if not constants.nbytes:
        return constants
    file, size = path / CONSTANTS, constants.nbytes
    try:
        content = np.frombuffer(read_bytes(file, size + 4), np.uint8)
    except OSError as error:
        raise StoreError(f"[store] cannot read {file}: {error.strerror}") from None
    if content.size != size + 4 or crc32c(content[:-4], size) != content[-4:].tobytes():
        raise StoreError(f"[store] {file} is damaged: its checksum or its size is wrong")
    constants.load(content[:-4])
    return constants
