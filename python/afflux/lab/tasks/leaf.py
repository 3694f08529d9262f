"""LEAF's JSON, in which each example has an owner, and FEMNIST, EMNIST's characters by writer."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np

from afflux.sim.data.files import FileLayout, bad_file, read_bytes, readable
from afflux.sim.data.image_set import Images, ImageSet

X = TypeVar("X")
Y = TypeVar("Y")


class LeafExamples(msgspec.Struct, Generic[X, Y], frozen=True):
    """A user's examples in LEAF's JSON: rows of pixels and labels, or strings and the characters that follow."""

    x: list[X]
    y: list[Y]


class LeafFile(msgspec.Struct, Generic[X, Y], frozen=True):
    """A file of LEAF's."""

    users: list[str]
    user_data: dict[str, LeafExamples[X, Y]]


def leaf_folders(name: str) -> tuple[str, ...]:
    """Return the folders of train/ and test/: of the user, and of LEAF's repository and its folder data/."""
    return name, f"{name}/data", f"data/{name}/data"


def read_leaf(folder: Path, kind: type[LeafFile[X, Y]]) -> Iterator[tuple[Path, str, LeafExamples[X, Y]]]:
    """Yield file, user and examples of all *.json in a folder, in the order of file names and of users in a file.

    Args:
        folder: train/ or test/.
        kind: `LeafFile[list[float], int]` for pixels, `LeafFile[str, str]` for text.

    Raises:
        ConfigError: there is no file, or a file is not of LEAF's form.
    """
    expected = "LEAF's JSON: 'users', and 'user_data' with 'x' (lists of pixels, or strings) and 'y' of each user"
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise bad_file(folder, "has no file *.json", expected)
    for path in paths:
        with readable(path, expected):
            # Errors of msgspec are ValueErrors, and name the place in the file.
            content = msgspec.json.decode(read_bytes(path, expected), type=kind)
        if len(set(content.users)) < len(content.users):
            raise bad_file(path, "lists a user twice", expected)
        for user in content.users:
            if user not in content.user_data:
                raise bad_file(path, f"has no data of user {user!r}", expected)
            examples = content.user_data[user]
            if len(examples.x) != len(examples.y):
                found = f"has {len(examples.x)} examples and {len(examples.y)} labels of user {user!r}"
                raise bad_file(path, found, expected)
            yield path, user, examples


def read_writers(folders: list[Path]) -> ImageSet:
    """Read FEMNIST, EMNIST's characters by writer, whose images are divided between both parts, or all in one."""
    kind, writers = Images("femnist", 62), dict[str, int]()
    (x_train, y_train, train), (x_test, y_test, test) = (_read_part(kind, folder, writers) for folder in folders)
    return ImageSet(kind.name, x_train, y_train, x_test, y_test, kind.num_classes, tuple(writers), train, test)


def _read_part(kind: Images, folder: Path, writers: dict[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images, labels, owner = [], [], array("q")
    expected = f"{kind.side**2} pixels between 0 and 1 in each example"
    for path, user, examples in read_leaf(folder, LeafFile[list[float], int]):
        if any(len(pixels) != kind.side**2 for pixels in examples.x):
            raise bad_file(path, f"has an example of user {user!r} with another number of pixels", expected)
        x = np.array(examples.x, np.float32).reshape(-1, 1, kind.side, kind.side)
        if not ((x >= 0) & (x <= 1)).all():
            raise bad_file(path, f"has pixels of user {user!r} outside 0 to 1", expected)
        images.append(x)
        with readable(path, f"labels from 0 to {kind.num_classes - 1}"):
            labels.append(kind.checked_labels(path, np.array(examples.y, np.int64), len(x)))
        owner.extend([writers.setdefault(user, len(writers))] * len(x))
    if not owner:
        raise bad_file(folder, "has no example", "users with examples")
    return np.concatenate(images), np.concatenate(labels), np.array(owner, np.int64)


FEMNIST = (FileLayout(leaf_folders("femnist"), ("train", "test"), read_writers),)
