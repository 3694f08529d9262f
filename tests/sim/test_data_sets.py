"""The papers' data sets: each in every format in which people have it, generated small, and the real ones if there."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from afflux.lab.tasks import text_set
from afflux.lab.tasks.inputs import content_digest
from afflux.lab.tasks.text_set import ALPHABET, encode
from afflux.sim.data import LAYOUTS, _read, read_data_set
from afflux.sim.data.image_set import channel_moments
from conftest import check_refused
from test_data_formats import idx


def random_images(count, num_classes, shape, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = rng.integers(0, num_classes, count, dtype=np.uint8)
    labels[:2] = (0, num_classes - 1)
    return images, labels


def write_idx(folder, train, test, parts, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in zip((train, test), parts, strict=True):
        for kind, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            content = gzip.compress(idx(array)) if suffix == ".gz" else idx(array)
            (folder / f"{name}-{kind}{suffix}").write_bytes(content)


def assert_parts(data, train, test):
    for images, labels, (wanted, wanted_labels) in (
        (data.x_train, data.y_train, train),
        (data.x_test, data.y_test, test),
    ):
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        assert np.array_equal(images, wanted)
        assert np.array_equal(labels, wanted_labels)
        assert not images.flags.writeable
        assert images.flags.c_contiguous


MNIST_FOLDERS = {"mnist": ("mnist", "MNIST/raw"), "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw")}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("name", "folder"), [(name, f) for name, folders in MNIST_FOLDERS.items() for f in folders])
def test_mnist_and_fashion_mnist_from_idx_files(tmp_path, name, folder, suffix):
    train, test = random_images(6, 10, (28, 28)), random_images(4, 10, (28, 28), 1)
    write_idx(tmp_path / folder, "train", "t10k", (train, test), suffix)
    data = read_data_set(name, tmp_path)
    assert data.shape == (1, 28, 28)
    assert data.num_classes == 10
    assert_parts(data, (train[0][:, None], train[1]), (test[0][:, None], test[1]))
    if name == "mnist":
        by_files = data
        arrays = {
            "x_train": train[0],
            "y_train": train[1].astype("u1"),
            "x_test": test[0],
            "y_test": test[1].astype("u1"),
        }
        np.savez(tmp_path / "mnist.npz", **arrays)
        _read.cache_clear()
        by_archive = read_data_set("mnist", tmp_path)
        assert content_digest(by_files.files()) == content_digest(by_archive.files())
        assert np.array_equal(by_files.x_test, by_archive.x_test)
        assert by_files.y_train.dtype == by_archive.y_train.dtype == np.int64


@pytest.mark.parametrize(
    "file", ["mnist.npz", "mnist/mnist.npz", "fashion-mnist.npz", "fashion_mnist.npz", "emnist-letters.npz"]
)
def test_archives_in_the_place_of_idx_files(tmp_path, file):
    train, test = random_images(6, 10, (28, 28)), random_images(4, 10, (28, 28), 1)
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    np.savez(path, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1].astype(np.int32)[:, None])
    data = read_data_set(path.stem.replace("_", "-"), str(tmp_path))
    assert_parts(data, (train[0][:, None], train[1]), (test[0][:, None], test[1]))


@pytest.mark.parametrize(
    ("split", "num_classes"), [("balanced", 47), ("byclass", 62), ("bymerge", 47), ("digits", 10), ("mnist", 10)]
)
@pytest.mark.parametrize("folder", ["emnist", "EMNIST/raw", "gzip", "."])
def test_emnist_is_turned_upright(tmp_path, split, num_classes, folder):
    train, test = random_images(6, num_classes, (28, 28)), random_images(4, num_classes, (28, 28), 1)
    write_idx(tmp_path / folder, f"emnist-{split}-train", f"emnist-{split}-test", (train, test), ".gz")
    data = read_data_set(f"emnist-{split}", tmp_path)
    assert data.num_classes == num_classes
    # The files hold the columns of an image one after the other.
    upright = [(images.transpose(0, 2, 1)[:, None], labels) for images, labels in (train, test)]
    assert_parts(data, *upright)


def test_labels_of_emnists_letters_count_from_1(tmp_path):
    images, labels = random_images(6, 26, (28, 28))
    write_idx(tmp_path, "emnist-letters-train", "emnist-letters-test", [(images, labels + 1)] * 2)
    assert read_data_set("emnist-letters", tmp_path).y_train.tolist() == labels.tolist()
    other = tmp_path / "other"
    write_idx(other, "emnist-letters-train", "emnist-letters-test", [(images, labels)] * 2)
    check_refused("has the label 0; expected: labels from 1", read_data_set, "emnist-letters", other)


def write_cifar(data_dir, form, files, num_classes):
    """Write a CIFAR in a form, and return images and labels of each file, in the order of `files`."""
    parts = [random_images(3, num_classes, (3, 32, 32), seed) for seed in range(len(files))]
    for file, (images, labels) in zip(files, parts, strict=True):
        data_dir.mkdir(exist_ok=True)
        fine = num_classes == 100
        if form == "npz":
            np.savez(data_dir / f"{file}.npz", x=images.transpose(0, 2, 3, 1), y=labels)
        else:
            coarse = [np.full((3, 1), 77, np.uint8)] if fine else []
            records = np.hstack([*coarse, labels[:, None], images.reshape(3, -1)])
            (data_dir / f"{file}.bin").write_bytes(records.tobytes())
    return parts


@pytest.mark.parametrize(
    ("form", "folder"),
    [
        ("npz", "cifar10"),
        ("npz", "."),
        ("bin", "cifar-10-batches-bin"),
        ("bin", "cifar10"),
    ],
)
def test_cifar_10(tmp_path, form, folder):
    files = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    parts = write_cifar(tmp_path / folder, form, files, 10)
    data = read_data_set("cifar10", tmp_path)
    assert data.shape == (3, 32, 32)
    train = tuple(np.concatenate(arrays) for arrays in zip(*parts[:5], strict=True))
    assert_parts(data, train, parts[5])


def test_cifar_100_with_its_fine_labels(tmp_path):
    parts = write_cifar(tmp_path / "cifar-100-binary", "bin", ["train", "test"], 100)
    data = read_data_set("cifar100", tmp_path)
    assert data.num_classes == 100
    assert_parts(data, *parts)


@pytest.mark.parametrize(("name", "num_classes"), [("cifar10", 10), ("cifar100", 100)])
@pytest.mark.parametrize("channels_last", [True, False])
def test_cifar_as_one_archive(tmp_path, name, num_classes, channels_last):
    train, test = random_images(6, num_classes, (3, 32, 32)), random_images(4, num_classes, (3, 32, 32), 1)
    x_train, x_test = (part[0].transpose(0, 2, 3, 1) if channels_last else part[0] for part in (train, test))
    np.savez(tmp_path / f"{name}.npz", x_train=x_train, y_train=train[1], x_test=x_test, y_test=test[1])
    assert_parts(read_data_set(name, tmp_path), train, test)


def test_only_some_of_the_files_are_there(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin", "bin", ["data_batch_1", "data_batch_2", "test_batch"], 10)
    check_refused(r"has no data_batch_3\.bin, data_batch_4\.bin, data_batch_5\.bin", read_data_set, "cifar10", tmp_path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_without_the_data_set(tmp_path, monkeypatch, name):
    monkeypatch.delenv("AFFLUX_DATA", raising=False)
    check_refused(f"data '{name}' is read from files: give their folder with --data-dir", read_data_set, name)
    check_refused("there is no folder", read_data_set, name, tmp_path / "absent")
    check_refused(rf"data '{name}': .* has none of: \S.*docs/reference/data\.md", read_data_set, name, tmp_path)
    monkeypatch.setenv("AFFLUX_DATA", str(tmp_path))
    check_refused("has none of", read_data_set, name)


def test_an_unknown_data_set():
    check_refused(r"unknown data 'mnits'.*mnist", read_data_set, "mnits", ".")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((6, 28, 27), np.uint8)}, r"has images of dtype uint8 and shape \(6, 28, 27\)"),
        ({"x_train": np.zeros((6, 28, 28), np.float32)}, r"dtype float32 .*; expected: uint8 of shape \(n, 28, 28\)"),
        ({"x_test": np.zeros((0, 28, 28), np.uint8)}, r"shape \(0, 28, 28\)"),
        ({"x_test": np.zeros((), np.uint8)}, r"shape \(\)"),
        ({"y_train": np.zeros(5, np.uint8)}, r"has labels of dtype uint8 and shape \(5,\); expected: 6 whole numbers"),
        ({"y_train": np.zeros(6)}, "has labels of dtype float64"),
        ({"y_train": np.full(6, 10)}, "has labels from 10 to 10; expected: 6 whole numbers from 0 to 9"),
        ({"y_test": np.full(4, -1)}, "has labels from -1 to -1"),
    ],
)
def test_shapes_dtypes_and_ranges_are_checked(tmp_path, change, message):
    (x_train, y_train), (x_test, y_test) = random_images(6, 10, (28, 28)), random_images(4, 10, (28, 28))
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    np.savez(tmp_path / "mnist.npz", **(arrays | change))
    assert str(tmp_path / "mnist.npz") in str(check_refused(message, read_data_set, "mnist", tmp_path))


def test_scaled_images_have_mean_0_and_variance_1_in_each_channel(tmp_path):
    parts = write_cifar(tmp_path / "cifar-100-binary", "bin", ["train", "test"], 100)
    data = read_data_set("cifar100", tmp_path)
    x_train, x_test = data.scaled()
    assert x_train.dtype == x_test.dtype == np.float32
    for channel in range(3):
        train, test = (part[0][:, channel].astype(np.float64) for part in parts)
        mean, deviation = channel_moments(parts[0][0][:, channel])
        # Sums of whole numbers are exact; the deviation differs by the rounding of a few thousand terms.
        assert mean == train.mean()
        assert abs(deviation - train.std()) <= 3072 * 2**-53 * train.std()
        for found, values in ((x_train, train), (x_test, test)):
            assert np.array_equal(found[:, channel], ((values - mean) / deviation).astype(np.float32))


def test_arrays_of_a_data_set_are_read_only_and_scaled_ones_are_new(tmp_path):
    write_cifar(tmp_path / "cifar-100-binary", "bin", ["train", "test"], 100)
    data = read_data_set("cifar100", tmp_path)
    assert not any(array.flags.writeable for array in (data.x_train, data.y_train, data.x_test, data.y_test))
    first, again = data.scaled(), data.scaled()
    for own, other in zip(first, again, strict=True):
        own[:] = 7
        assert not (other == 7).all()


def test_a_channel_without_variance_is_0(tmp_path):
    images = np.full((2, 28, 28), 9, np.uint8)
    labels = np.zeros(2, np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert not read_data_set("mnist", tmp_path).scaled()[0].any()


def write_leaf(folder, files):
    for name, users in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        path.write_text(json.dumps(content))


@pytest.mark.parametrize("folder", ["femnist", "femnist/data", "data/femnist/data"])
def test_femnist_by_writer(tmp_path, folder):
    rng = np.random.default_rng(0)

    def images(count):
        return rng.random((count, 784)).astype(np.float32).tolist()

    first, second, third = images(3), images(1), images(2)
    write_leaf(
        tmp_path / folder,
        {
            "train/a.json": {"f1": (first, [0, 61, 5]), "f2": (second, [7])},
            "test/a.json": {"f3": (third, [1, 2]), "f1": (second, [9])},
        },
    )
    data = read_data_set("femnist", tmp_path)
    assert data.owners == ("f1", "f2", "f3")
    assert data.train_owner.tolist() == [0, 0, 0, 1]
    assert data.test_owner.tolist() == [2, 2, 0]
    assert data.y_train.tolist() == [0, 61, 5, 7]
    assert data.x_train.dtype == np.float32
    assert data.x_train.shape == (4, 1, 28, 28)
    assert np.array_equal(data.x_train.reshape(4, 784), np.float32(first + second))
    assert [shard.tolist() for shard in data.shards()] == [[0, 1, 2], [3], []]
    scaled, _ = data.scaled()
    assert abs(scaled.mean(dtype=np.float64)) < 1e-6


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[0.5] * 783], [1], "another number of pixels"),
        ([[1.5] * 784], [1], "outside 0 to 1"),
        ([[0.5] * 784], [62], "labels from 62 to 62"),
        ([[0.5] * 784], [2**63], "beyond 64 bits|cannot be read"),
        ([], [], "has no example"),
    ],
)
def test_femnist_with_other_contents(tmp_path, x, y, message):
    write_leaf(tmp_path / "femnist", {"train/a.json": {"u": (x, y)}, "test/a.json": {"u": ([[0] * 784], [1])}})
    check_refused(message, read_data_set, "femnist", tmp_path)


def decode(codes):
    return "".join(ALPHABET[code] for code in codes)


def test_the_alphabet():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert encode(ALPHABET).tolist() == list(range(80))
    assert decode(encode("Où \U0001f600 $\x00\ud800?")) == "O       ?"


def pieces(data, starts):
    windows, targets = data.examples(starts)
    return [decode(row) + decode([target]) for row, target in zip(windows, targets, strict=True)]


def test_windows_of_speeches(tmp_path, monkeypatch):
    long = "x" * 100
    speeches = [("P", "A", "Ay,\\n  me."), ("P", "B", long), ("P", "A", long), ("Q", "A", "no")]
    lines = ["play\tspeaker\ttext", *("\t".join(speech) for speech in speeches)]
    (tmp_path / "shakespeare_speeches.tsv").write_text("\n".join(lines))
    monkeypatch.setattr(text_set, "LEAST_CHARACTERS", 100)
    monkeypatch.setattr(text_set, "TRAIN_SHARE", 0.05)
    data = read_data_set("shakespeare", tmp_path)
    assert data.owners == ("P: A", "P: B")
    found = pieces(data, data.train)
    line = "Ay, me.\n"
    assert found[:8] == [(" " * 80 + line)[i : i + 81] for i in range(8)]
    assert found[8:] == [(" " * 80 + long + "\n")[i : i + 81] for i in range(101)]
    assert data.train_owner.tolist() == [0] * 8 + [1] * 101
    # The first speech of A has a twentieth of its characters; the second one is for the test.
    assert pieces(data, data.test) == found[8:]
    assert data.test_owner.tolist() == [0] * 101
    assert [len(shard) for shard in data.shards()] == [8, 101]
    for array in (data.text, data.train, data.test, data.train_owner, data.test_owner):
        assert not array.flags.writeable


def test_roles_with_too_few_characters(tmp_path):
    path = tmp_path / "shakespeare_speeches.tsv"
    path.write_text(f"play\tspeaker\ttext\nP\tA\t{'x' * 999}")
    check_refused("has no role with 1000 characters", read_data_set, "shakespeare", tmp_path)
    path.write_text(f"play\tspeaker\ttext\nP\tA\t{'x' * 1000}")
    assert read_data_set("shakespeare", tmp_path).owners == ("P: A",)


def test_leafs_shakespeare(tmp_path):
    window = "ab" * 40
    write_leaf(
        tmp_path / "data" / "shakespeare" / "data",  # in LEAF's repository
        {
            "train/a.json": {"ROLE": ([window, window[1:] + "c"], ["c", "d"])},
            "train/b.json": {"OTHER": ([window], ["\n"])},
            "test/a.json": {"ROLE": ([window], ["z"])},
        },
    )
    data = read_data_set("shakespeare", tmp_path)
    assert data.owners == ("ROLE", "OTHER")
    assert pieces(data, data.train) == [window + "c", window[1:] + "cd", window + "\n"]
    assert data.train_owner.tolist() == [0, 0, 1]
    assert pieces(data, data.test) == [window + "z"]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [(["ab"], ["c"], "2 characters and 1 after"), (["a" * 80], [""], "0 after them"), ([], [], "has no example")],
)
def test_leafs_shakespeare_with_other_contents(tmp_path, x, y, message):
    write_leaf(tmp_path / "shakespeare", {"train/a.json": {"u": (x, y)}, "test/a.json": {"u": (["a" * 80], ["b"])}})
    check_refused(message, read_data_set, "shakespeare", tmp_path)


def real(*files):
    folder = os.environ.get("AFFLUX_DATA")
    if not folder or not all((Path(folder) / file).exists() for file in files):
        pytest.skip(f"needs {', '.join(files)} in the folder AFFLUX_DATA")
    return Path(folder)


def test_mnist_itself():
    data = read_data_set("mnist", real("mnist.npz"))
    assert data.x_train.shape == (60000, 1, 28, 28)
    assert np.bincount(data.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(data.y_test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    # The usual mean and deviation for scaling MNIST.
    mean, deviation = channel_moments(data.x_train)
    assert (round(mean / 255, 4), round(deviation / 255, 4)) == (0.1307, 0.3081)


def test_cifar_10_itself():
    data = read_data_set("cifar10", real("cifar10/data_batch_5.npz", "cifar10/test_batch.npz"))
    assert data.x_train.shape == (50000, 3, 32, 32)
    assert np.bincount(data.y_train).tolist() == [5000] * 10
    assert np.bincount(data.y_test).tolist() == [1000] * 10
    assert data.y_train[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    means = [round(channel_moments(data.x_train[:, channel])[0] / 255, 4) for channel in range(3)]
    assert means == [0.4914, 0.4822, 0.4465]


def test_shakespeare_itself(monkeypatch):
    folder = real("shakespeare_speeches.tsv")
    large = read_data_set("shakespeare", folder)
    monkeypatch.setattr(text_set, "LEAST_CHARACTERS", 0)
    _read.cache_clear()
    data = read_data_set("shakespeare", folder)
    _read.cache_clear()
    assert len(data.owners) == 1399
    # A window for each character, and one for the end of each of the 31,028 speeches.
    assert (decode(data.text).count("\n"), len(data.train) + len(data.test)) == (31028, len(data.text) - 80 * 31028)
    assert len(large.owners) == 637
    shares = np.bincount(large.train_owner, minlength=637) / np.bincount(
        np.concatenate([large.train_owner, large.test_owner]), minlength=637
    )
    assert 0.8 <= np.median(shares) < 0.9
    assert shares.min() > 0.75
