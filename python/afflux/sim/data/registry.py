"""The data sets by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

from afflux.sim.data.cifar import read_cifar10, read_cifar100
from afflux.sim.data.femnist import read_femnist
from afflux.sim.data.formats.errors import PAGE
from afflux.sim.data.image_set import ImageSet
from afflux.sim.data.mnist import EMNIST_CLASSES, read_emnist, read_fashion_mnist, read_mnist
from afflux.sim.data.shakespeare import read_shakespeare
from afflux.sim.data.text_set import TextSet
from afflux.sim.errors import ConfigError, known

DataSet: TypeAlias = ImageSet | TextSet


@dataclass(frozen=True)
class Source:
    """A data set that can be read."""

    description: str
    read: Callable[[Path], DataSet]


SOURCES: dict[str, Source] = {
    "mnist": Source("handwritten digits, 28x28 grey", read_mnist),
    "fashion-mnist": Source("pieces of clothing, 28x28 grey, 10 classes", read_fashion_mnist),
    **{
        f"emnist-{split}": Source(f"EMNIST's {split}, 28x28 grey, {count} classes", partial(read_emnist, split=split))
        for split, count in EMNIST_CLASSES.items()
    },
    "femnist": Source("EMNIST's characters by writer (LEAF), 28x28 grey, 62 classes", read_femnist),
    "cifar10": Source("photographs, 32x32 in colour, 10 classes", read_cifar10),
    "cifar100": Source("photographs, 32x32 in colour, 100 classes", read_cifar100),
    "shakespeare": Source("speeches by speaking role, the next of 80 characters", read_shakespeare),
}


def read_data_set(name: str, data_dir: Path | str | None = None) -> DataSet:
    """Read a data set, once per process and folder.

    Args:
        name: one of `SOURCES`.
        data_dir: the folder; None: that of the environment variable AFFLUX_DATA.

    Returns:
        An `ImageSet`, or a `TextSet` for shakespeare.

    Raises:
        ConfigError: an unknown name, no folder, no file of the data set in it, or a damaged file.
    """
    known("data", name, SOURCES)
    folder = data_dir or os.environ.get("AFFLUX_DATA")
    if not folder:
        raise ConfigError(
            f"data {name!r} is read from files: give their folder with --data-dir or AFFLUX_DATA ({PAGE})"
        )
    return _read(name, Path(folder))


@lru_cache(maxsize=2)
def _read(name: str, data_dir: Path) -> DataSet:
    return SOURCES[name].read(data_dir)
