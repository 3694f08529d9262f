"""Readers of data files: what they read is what was written, and damaged or hostile files give a clear error."""

import gzip
import os
import struct
import tracemalloc
import zipfile
from io import BytesIO

import numpy as np
import pytest

from afflux.lab.tasks.leaf import LeafFile, read_leaf
from afflux.sim.data.files import MOST_BYTES, read_idx, read_npz, read_records, read_table
from conftest import check_refused
from surroundings import traced_memory_below

PIXELS, TEXT = LeafFile[list[float], int], LeafFile[str, str]


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("shape", [(5, 4, 3), (1, 1, 1), (0, 28, 28)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_as_written(tmp_path, shape, suffix):
    images = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / f"images-idx3-ubyte{suffix}"
    path.write_bytes(gzip.compress(idx(images)) if suffix else idx(images))
    found = read_idx(path, 3)
    assert found.dtype == np.uint8
    assert found.shape == shape
    assert np.array_equal(found, images)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with the bytes"),
        (b"\x1f\x8b\x08\x00", "begins with the bytes 1f 8b 08 00"),
        (b"\0\0\x0d\x03", "type 0x0d and 3 dimensions"),
        (b"\0\0\x08\x01\0\0\0\x05hello", "type 0x08 and 1 dimensions"),
        (b"\0\0\x08\x03\0\0\0\x01", "ends within its header"),
        (b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + b"1234567", r"has 7 bytes after its header; expected: 8 bytes"),
        (b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + b"123456789", "has more than 8 bytes"),
        (b"\0\0\x08\x03" + b"\xff\xff\xff\xff" * 3 + b"1", "has the shape"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path, content, message):
    path = tmp_path / "images"
    path.write_bytes(content)
    said = str(check_refused(message, read_idx, path, 3))
    assert (str(path) in said, "docs/reference/data.md" in said) == (True, True)


def test_a_gzip_file_that_ends_early_or_is_none(tmp_path):
    path = tmp_path / "x.gz"
    whole = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (9, 9, 9), dtype=np.uint8)))
    for content in (whole[: len(whole) // 2], b"no gzip", whole[:-4] + b"\0\0\0\0"):
        path.write_bytes(content)
        check_refused(r"x\.gz cannot be read", read_idx, path, 3)


def test_archives_of_numpy(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(3), y=np.ones(2))
    y, x = read_npz(path, ("y", "x"))
    assert (x.tolist(), y.tolist()) == ([0, 1, 2], [1, 1])
    check_refused(r"a\.npz has no array z; expected: an \.npz archive with the arrays x, z", read_npz, path, ("x", "z"))
    np.savez(path, x=np.array([{"an": "object"}], dtype=object))
    check_refused("cannot be read", read_npz, path, ("x",))
    path.write_bytes(saved(np.arange(3)))
    check_refused("cannot be read", read_npz, path, ("x",))
    path.write_bytes(b"PK\x03\x04 no zip")
    check_refused("cannot be read", read_npz, path, ("x",))
    check_refused("cannot be read", read_npz, tmp_path / "absent.npz", ("x",))


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifars_binary_version(tmp_path, label_bytes):
    rng = np.random.default_rng(2)
    records = rng.integers(0, 256, (4, label_bytes + 3072), dtype=np.uint8)
    path = tmp_path / "batch.bin"
    path.write_bytes(records.tobytes())
    images, labels = read_records(path, label_bytes)
    assert labels.tolist() == records[:, label_bytes - 1].tolist()
    # The red plane first, then green and blue, each row by row.
    assert images[2, 1, 31, 5] == records[2, label_bytes + 1024 + 31 * 32 + 5]
    for content in (b"", records.tobytes()[:-1]):
        path.write_bytes(content)
        check_refused(f"records of {label_bytes + 3072} bytes", read_records, path, label_bytes)


def lines(path, columns=("play", "speaker", "text")):
    return [values for _, values in read_table(path, columns)]


READERS = {
    "images-idx3-ubyte": lambda path: read_idx(path, 3),
    "images-idx3-ubyte.gz": lambda path: read_idx(path, 3),
    "cifar10.npz": lambda path: read_npz(path, ("x",)),
    "train.bin": lambda path: read_records(path, 2),
    "users.json": lambda path: list(read_leaf(path.parent, PIXELS)),
    "speeches.tsv": lines,
    "devices.csv": lambda path: list(read_table(path, ("time",), quoted=True)),
}


@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_of_a_bounded_size_are_read(tmp_path, name):
    path = tmp_path / name
    os.mkfifo(path)
    check_refused(f"{name} cannot be read .*a FIFO", READERS[name], path)
    path.unlink()
    path.mkdir()
    check_refused(f"{name} cannot be read .*a folder", READERS[name], path)
    path.rmdir()
    path.touch()
    os.truncate(path, MOST_BYTES + 1)  # without disk space
    check_refused(f"{name} cannot be read .*more than {MOST_BYTES} bytes", READERS[name], path)


def test_links_to_files_are_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(idx(np.arange(3, dtype=np.uint8)))
    (tmp_path / "labels").symlink_to("elsewhere")
    assert read_idx(tmp_path / "labels", 1).tolist() == [0, 1, 2]
    (tmp_path / "loop").symlink_to("loop")
    check_refused("loop cannot be read", read_idx, tmp_path / "loop", 1)


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1), (2**32 - 1, 0, 2**31), (2**11, 2**10, 2**10)])
def test_idx_shapes_beyond_the_largest_file(tmp_path, shape):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBB3I", 0, 8, 3, *shape) + bytes(10**6)))
    check_refused(f"has the shape .*expected: at most {MOST_BYTES} bytes", read_idx, path, 3)


def test_a_gzip_bomb_is_read_up_to_the_shape(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 1000) + bytes(50_000_000)))
    with traced_memory_below(3_000_000):
        check_refused("has more than 1000 bytes", read_idx, path, 1)


def archive_of(path, content, method=zipfile.ZIP_DEFLATED, size=None):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", content)
    if size is not None:  # in the directory, at the end; the size follows the CRC and the compressed size
        content = bytearray(path.read_bytes())
        place = content.rindex(b"PK\x01\x02") + 24
        content[place : place + 4] = struct.pack("<I", size)
        path.write_bytes(content)


def saved(array):
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_archives_that_are_compressed_by_lzma(tmp_path):
    """Also one whose directory names fewer bytes than it holds: most is not decompressed. Damage is an error."""
    path, values = tmp_path / "a.npz", np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    archive_of(path, saved(values), zipfile.ZIP_LZMA)
    assert (read_npz(path, ("x",))[0] == values).all()
    content = bytearray(path.read_bytes())
    for place in range(100, 460, 30):
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        check_refused("cannot be read", read_npz, path, ("x",))
    zeros = saved(np.zeros(100_000_000, np.uint8))
    archive_of(path, zeros, zipfile.ZIP_LZMA, size=200)
    del zeros
    with traced_memory_below(75_000_000):
        check_refused("cannot be read", read_npz, path, ("x",))


def test_archives_that_are_bombs(tmp_path):
    path = tmp_path / "a.npz"
    zeros = saved(np.zeros(50_000_000, np.uint8))
    with traced_memory_below(3_000_000 + len(zeros)):
        archive_of(path, zeros, size=MOST_BYTES + 1)
        check_refused(f"arrays of {MOST_BYTES + 1} bytes; expected: at most {MOST_BYTES}", read_npz, path, ("x",))
        tracemalloc.reset_peak()
        archive_of(path, zeros, size=200)
        check_refused("cannot be read", read_npz, path, ("x",))
        archive_of(path, zeros, zipfile.ZIP_BZIP2, size=200)
        tracemalloc.reset_peak()
        check_refused("another method than deflate", read_npz, path, ("x",))
        archive_of(path, zeros[: zeros.index(b"\n") + 1])  # a header alone
        check_refused("cannot be read", read_npz, path, ("x",))
    np.savez(path, x=np.ones(3), x1=np.ones(2))
    content = bytearray(path.read_bytes())
    for place in [i for i in range(len(content)) if content[i : i + 4] == b"PK\x01\x02"]:
        content[place + 8] |= 1  # encrypted
    path.write_bytes(content)
    check_refused("cannot be read", read_npz, path, ("x",))


def test_leafs_json(tmp_path):
    (tmp_path / "b.json").write_text(
        '{"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": [[0.5]], "y": [3]}}}'
    )
    (tmp_path / "a.json").write_text(
        '{"users": ["w", "v"], "user_data": {"v": {"x": [], "y": []}, "w": {"x": [[1, 0]], "y": [0]}}}'
    )
    found = [(path.name, user, examples.x, examples.y) for path, user, examples in read_leaf(tmp_path, PIXELS)]
    assert found == [("a.json", "w", [[1, 0]], [0]), ("a.json", "v", [], []), ("b.json", "u", [[0.5]], [3])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"users": []}', "missing required field `user_data`"),
        ('{"users": ["u"], "user_data": {}}', "has no data of user 'u'"),
        ('{"users": ["u", "u"], "user_data": {"u": {"x": [], "y": []}}}', "lists a user twice"),
        ('{"users": ["u"], "user_data": {"u": {"x": ["a"], "y": []}}}', "has 1 examples and 0 labels of user 'u'"),
        ('{"users": ["u"], "user_data": {"u": {"x": [[1]], "y": ["a"]}}}', r"Expected `str`, got `array`.*x\[0\]"),
        ('{"users": ["u"], "user_data": {"u": {"x": ["a"], "y": [1]}}}', r"Expected `str`, got `int`.*y\[0\]"),
    ],
)
def test_json_of_another_form(tmp_path, content, message):
    (tmp_path / "all.json").write_text(content)
    assert "all.json" in str(check_refused(message, list, read_leaf(tmp_path, TEXT)))


def test_a_folder_without_json(tmp_path):
    check_refused(r"has no file \*\.json", list, read_leaf(tmp_path, TEXT))


def test_tables_of_speeches(tmp_path):
    path = tmp_path / "speeches.tsv"
    path.write_text('no\tspeaker\ttext\tplay\r\n1\tA\tone\\ntwo\tP\r\n\n2\tB "q"\tthree\tP', "utf-8", newline="")
    assert lines(path) == [["P", "A", "one\\ntwo"], ["P", 'B "q"', "three"]]
    path.write_text("play\ttext\n")
    check_refused("has no column speaker", lines, path)
    path.write_text("play\tspeaker\ttext\na\tb\tc\na\tb\n")
    check_refused("has 2 values in line 3; expected: 3", lines, path)
    path.write_bytes(BytesIO("play\tspeaker\ttext\na\tb\té\n".encode("latin-1")).getvalue())
    check_refused("cannot be read", lines, path)
