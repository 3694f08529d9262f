"""Creation of new stores."""

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux._engine import ORDER_VERSION
from afflux.aggregation.options import codec_of
from afflux.ops.errors import StoreError, UnavailableError
from afflux.ops.validation import brief
from afflux.rules.rule import Rule
from afflux.store.constants_file import write_constants
from afflux.store.files import reason, try_open_files
from afflux.store.lock import LOCK, locked
from afflux.store.metadata import INDEX, NAME, make_arrays, sync
from afflux.store.schema import make_index
from afflux.store.shards import shapes_in
from afflux.store.stored_rule import warn_of_own_parts

#: More files than a new store has open, and than its removal opens if it cannot be made.
_OPEN_FILES = 16


def create_store(
    path: Path,
    rule: Rule,
    server: Mapping[str, Any],
    stored: Mapping[str, Mapping[str, Any]],
    constants: npt.NDArray[np.uint8],
    cuts: Sequence[int],
) -> None:
    """Make a store in a new folder, for a server with these facts.

    `stored` is a result of `ServerOptions.stored`. `constants` are the bytes of the model's constants and local arrays,
    which are written once. `cuts` are those of `StoredPlane.cuts`.

    Raises:
        StoreError: the folder is not empty, or cannot be written.
    """
    if sys.byteorder != "little":
        raise UnavailableError("[store] rows are kept in little-endian order, and this machine is big-endian")
    for name in rule.rule_vectors:
        if not re.fullmatch(NAME, name):
            raise StoreError(f"[Server] store: no folder can be called after the rule vector {brief(name)}: {NAME}")
    codec = codec_of(rule, server["slot_dtype"])
    shapes = shapes_in(server, stored["options"], cuts, rule.rule_vectors, rule.buffer_size, codec)
    facts: dict[str, Any] = {
        "order_version": ORDER_VERSION,
        "server": {**server, "codec": None if codec is None else codec.name, **({"cuts": [*cuts]} if cuts else {})},
        **stored,
        "rule": rule.to_config(),
        "shapes": shapes,
        "repairs": [],
    }
    try:
        try_open_files(_OPEN_FILES)
        path.mkdir(parents=True, exist_ok=True)
        _refuse_contents(path)
        with locked(path):
            _refuse_contents(path)  # another process may have had the lock before
            try:
                make_arrays(path, shapes)
                if constants.size:
                    write_constants(path, constants)
                make_index(path / INDEX, facts)
                for folder in (path, path.parent):
                    sync(folder)
            except BaseException:
                remove_contents(path)
                raise
    except OSError as error:
        raise StoreError(f"[Server] store: cannot make {path}: {reason(error)}") from None
    warn_of_own_parts(path, rule.to_config())


@contextmanager
def removed_if_it_fails(path: Path) -> Iterator[None]:
    """Remove a folder if the block raises.

    Remove also the folders above it. A folder stays if it existed before the block, or is not empty.
    """
    new: list[Path] = []
    with suppress(OSError):
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if new and not any(file.name != LOCK for file in path.iterdir()):
                (path / LOCK).unlink(missing_ok=True)
            for folder in new:
                folder.rmdir()
        raise


def remove_contents(path: Path) -> None:
    """Remove all files of a new store except its lock, which the caller holds; ignore errors."""
    with suppress(OSError):
        for file in path.iterdir():
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file, ignore_errors=True)
            elif file.name != LOCK:
                file.unlink(missing_ok=True)


def _refuse_contents(path: Path) -> None:
    """Raise StoreError if the folder contains anything except the lock of a failed attempt."""
    if not any(file.name != LOCK for file in path.iterdir()):
        return
    if (path / INDEX).exists():
        raise StoreError(f"[Server] store: {path} is not empty; Server.open opens an existing store")
    raise StoreError(
        f"[Server] store: {path} is not empty, and holds no store: {INDEX} is missing. Give a new folder; if an "
        "attempt to make a store here has failed, remove what it has left"
    )
