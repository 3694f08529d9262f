"""FEMNIST: EMNIST's characters by writer, in LEAF's JSON."""

from array import array
from pathlib import Path

import numpy as np

from afflux.sim.data.folder import Layout, read_first
from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.leaf import leaf_folders, read_pixels
from afflux.sim.data.image_set import ImageSet, checked_labels, make_image_set

SIDE = 28
NUM_CLASSES = 62


def read_femnist(data_dir: Path) -> ImageSet:
    """Read FEMNIST: 62 classes, images of 28x28 pixels (float32, 1 is white), owned by writers."""
    return read_first("femnist", data_dir, [Layout(leaf_folders("femnist"), ("train", "test"), _read)])


def _read(folders: list[Path]) -> ImageSet:
    # A writer's images are divided between both parts, or all in one of them.
    writers: dict[str, int] = {}
    train, test = (_read_part(folder, writers) for folder in folders)
    owners = tuple(writers)
    return make_image_set(
        "femnist", train[:2], test[:2], NUM_CLASSES, owners=owners, train_owner=train[2], test_owner=test[2]
    )


def _read_part(folder: Path, writers: dict[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images, labels, owner = [], [], array("q")
    for path, user, examples in read_pixels(folder):
        expected = f"{SIDE * SIDE} pixels between 0 and 1 in each example"
        if any(len(pixels) != SIDE * SIDE for pixels in examples.x):
            raise bad_file(path, f"has an example of user {user!r} with another number of pixels", expected)
        own = np.array(examples.x, np.float32).reshape(-1, 1, SIDE, SIDE)
        if not ((own >= 0) & (own <= 1)).all():
            raise bad_file(path, f"has pixels of user {user!r} outside 0 to 1", expected)
        images.append(own)
        labels.append(checked_labels(path, _whole(path, examples.y), len(own), NUM_CLASSES))
        owner.extend([writers.setdefault(user, len(writers))] * len(own))
    if not owner:
        raise bad_file(folder, "has no example", "users with examples")
    return np.concatenate(images), np.concatenate(labels), np.array(owner, np.int64)


def _whole(path: Path, labels: list[int]) -> np.ndarray:
    try:
        return np.array(labels, np.int64)
    except OverflowError:
        raise bad_file(path, "has a label beyond 64 bits", f"labels from 0 to {NUM_CLASSES - 1}") from None
