"""Readers of data files: what they read is what was written, and damaged or hostile files give a clear error."""

import gzip
import os
import pickle
import struct
import tracemalloc
import zipfile
from io import BytesIO
from time import process_time

import numpy as np
import pytest

from afflux.lab.tasks.leaf import LeafFile, read_leaf
from afflux.ops.errors import ConfigError
from afflux.sim.data import read_data_set
from afflux.sim.data.files import MOST_BYTES, read_idx, read_npz, read_pickled_batch, read_records, read_table
from conftest import check_refused
from surroundings import traced_memory_below

PIXELS, TEXT = LeafFile[list[float], int], LeafFile[str, str]


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def python2_batch(labels_key=b"labels", count=3):
    """The opcodes of CIFAR's published files, which Python 2 wrote: strings are SHORT_BINSTRING and BINSTRING."""
    data = np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8)

    def string(text):
        return b"U" + bytes([len(text)]) + text

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85" + string(b"b") + b"\x87R"
        b"(K\x01K" + bytes([count]) + b"M\x00\x0c\x86cnumpy\ndtype\nq\x07" + string(b"u1") + b"K\x00K\x01\x87R(K\x03"
        + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<I", data.size) + data.tobytes() + b"tb"
    )  # fmt: skip
    labels = b"]q\x03(" + b"".join(b"K" + bytes([label]) for label in range(count)) + b"e"
    body = b"}q\x01(" + string(b"batch_label") + string(b"training batch 1 of 5")
    return b"\x80\x02" + body + string(labels_key) + labels + string(b"data") + array + b"u.", data


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


def test_cifars_python_version_as_python_2_wrote_it(tmp_path):
    content, data = python2_batch()
    # The file is a right one: Python's own unpickler gives the same.
    assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"], data)
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    images, labels = read_pickled_batch(path, "labels")
    assert labels.tolist() == [0, 1, 2]
    assert np.array_equal(images.reshape(3, 3072), data)


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickles_of_python_3_hold_the_same(tmp_path, protocol, order):
    images = np.array(np.random.default_rng(3).integers(0, 256, (300, 3072), dtype=np.uint8), order=order)
    labels = [0, 255, *range(256), *range(42)]
    numbers = [65536, 2**31 - 1, -1, *range(3000)]
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"n": numbers, "data": images, "labels": labels, "m": ["a.png", b"raw"]}, protocol))
    array, found = read_pickled_batch(path, "labels")
    assert array.dtype == np.uint8
    assert np.array_equal(array.reshape(300, 3072), images)
    assert found.tolist() == labels


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Stateful:
    def __setstate__(self, state):
        raise AssertionError("executed")

    def __getstate__(self):
        return {"a": 1}


HOSTILE = {
    "system": Call(os.system, "touch executed"),
    "eval": Call(eval, "open('executed', 'w')"),
    "getattr": Call(getattr, "x", "upper"),
    "load": Call(np.load, "x"),
    "object": Stateful(),
    "type": int,
    "set": {1, 2},
    "objects": np.array([{}, 1], dtype=object),
    "record": np.zeros(2, dtype=[("a", "i4")]),
    "text": np.array(["a", "b"]),
    "matrix": np.zeros((2, 2)).view(np.matrix),
    "scalar": np.float64(1),
    "masked": np.ma.array([1, 2], mask=[0, 1]),
    "bytearray call": Call(bytearray, 10),
    "time": np.array(["2020-01-01"], dtype="datetime64[s]"),
}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_nothing_that_a_pickle_names_is_executed(tmp_path, monkeypatch, name, protocol):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": HOSTILE[name], "labels": [1]}, protocol))
    check_refused("data_batch_1", read_pickled_batch, path, "labels")
    assert [entry.name for entry in tmp_path.iterdir()] == ["data_batch_1"]


def test_a_call_is_named_in_the_error(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": Call(os.system, "true"), "labels": [1]}, 2))
    check_refused(rf"refers to '{os.system.__module__}.system'\); expected: a", read_pickled_batch, path, "labels")


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
#: The beginning of a pickled dict with the labels; its data follow.
DATA = b"\x80\x02}(U\x06labels]U\x04data"
UINT8 = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02K\x01.",
        b"\x80\x02]K\x01a.",
        DATA + ARRAY + b"u",  # no end
        DATA + ARRAY + b"(K\x01K\x02\x85" + UINT8 + b"\x89U\x01atbu.",  # 1 byte for 2
        DATA + ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + UINT8 + b"\x89U\x00tbu.",  # length -1
        DATA + ARRAY + b"(K\x01U\x01a" + UINT8 + b"\x89U\x01atbu.",  # a shape that is no tuple
        DATA + ARRAY + b"}bu.",  # a state that is no tuple
        DATA + b"]}bu.",  # a state for a list
        DATA + b"T\xff\xff\xff\x7fabcu.",  # a string that is longer than the file
        DATA + b"\x8d" + b"\xff" * 8 + b"u.",
        b"\x80\x02}(h\x07K\x01u.",  # an object that was never stored
        b"\x80\x02}((K\x01tK\x01u.",  # a tuple as key
        b"\x80\x02}(K\x01u.",  # a key without value
        b"\x80\x02]K\x01K\x02s.",
        b"\x80\x02}K\x01a.",
        b"\x80\x02\x87.",
        b"\x80\x02}(U\x01aP1\nu.",  # a persistent object
        b"\x80\x02}(U\x01a\x82\x01u.",  # an extension
        b"\x80\x02}(U\x01acnumpy\nndarray\n)\x81u.",  # a new object
        b"\x80\x02}(U\x01a(cos\nsystem\nU\x04trueou.",  # OBJ
        b"\x80\x02}(U\x01a(U\x04trueios\nsystem\nu.",  # INST
        DATA + ARRAY + b"u.",  # an array without content
        b"\x80\x02}U\x04data(s.",  # a mark as value
        b"\x80\x02}U\x04data" + UINT8 + b"s.",
        b"\x80\x02}U\x04data]cnumpy\nndarray\nas.",
        b"\x80\x02}U\x04data}U\x01acnumpy\nndarray\n\x85\x85ss.",
        b"\x80\x02cnumpy\nndarray\n.",
        b"\x80\x02cnumpy\nndarray\n)R.",
        b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aU\x06rot_13\x86R.",
        b"\x80\x02}K\x01K\x02R.",
        b"\x80\x04K\x01K\x02\x93.",  # a name that is no text
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\xff\xfe",
        b"I1" + b"0" * 5000 + b"\n.",
    ],
)
def test_pickles_that_are_damaged_or_no_dict_of_plain_data(tmp_path, content):
    path = tmp_path / "batch"
    path.write_bytes(content)
    check_refused("batch", read_pickled_batch, path, "labels")


def long(number):
    content = number.to_bytes(10, "little")
    return b"\x8a" + bytes([len(content)]) + content


BOMBS = {
    "numbers of the memo": b"\x80\x02}r\x00\xe1\xf5\x05(u.",
    "a long string": DATA + b"T\xff\xff\xff\x7fabcu.",
    "a long frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x0f}.",
    "keys with one hash": b"\x80\x02}(" + b"".join(long(i * (2**61 - 1)) + b"N" for i in range(1, 40_000)) + b"u.",
    "a key of nested tuples": b"\x80\x02}(" + b")" + b"q\x00h\x00\x86" * 60 + b"Nu.",
    "a key of a long tuple": b"\x80\x02}((" + b"K\x01" * 100_000 + b"tq\x00N" + b"h\x00N" * 100_000 + b"u.",
    "lists in lists": DATA + b"]" * 200_000 + b"a" * 199_999 + b"u.",
    "a list in itself": DATA + b"]q\x02h\x02au.",
    "many dicts": DATA + b"}" * 100_000 + b"u.",
    "a shape of nested tuples": DATA + ARRAY + (b"(K\x01)" + b"q\x00h\x00\x86" * 60 + UINT8 + b"\x89U\x00tbu."),
    "many fills": b"\x80\x02}" + b"(u" * 100_000 + b".",
    "attributes of a class": DATA + b"cnumpy\ndtype\nN}U\x01aK\x01s\x86bu.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_pickles_take_time_and_memory_in_proportion_to_the_file(tmp_path, name):
    path = tmp_path / "batch"
    path.write_bytes(BOMBS[name])
    begin = process_time()
    with traced_memory_below(2e6 + 200 * len(BOMBS[name])):
        check_refused("batch", read_pickled_batch, path, "labels")
        assert process_time() - begin < 10


def lines(path, columns=("play", "speaker", "text")):
    return [values for _, values in read_table(path, columns)]


def roles(path):
    (path.parent / "shakespeare").mkdir()
    (path.parent / "shakespeare" / "roles").symlink_to(path.parent)
    try:
        read_data_set("shakespeare", path.parent)
    finally:
        (path.parent / "shakespeare" / "roles").unlink()
        (path.parent / "shakespeare").rmdir()


READERS = {
    "images-idx3-ubyte": lambda path: read_idx(path, 3),
    "images-idx3-ubyte.gz": lambda path: read_idx(path, 3),
    "cifar10.npz": lambda path: read_npz(path, ("x",)),
    "train.bin": lambda path: read_records(path, 2),
    "data_batch_1": lambda path: read_pickled_batch(path, "labels"),
    "users.json": lambda path: list(read_leaf(path.parent, PIXELS)),
    "speeches.tsv": lines,
    "Hamlet.txt": roles,
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
    """Also one whose directory names fewer bytes than it holds: most is not decompressed."""
    path, values = tmp_path / "a.npz", np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    archive_of(path, saved(values), zipfile.ZIP_LZMA)
    assert (read_npz(path, ("x",))[0] == values).all()
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


@pytest.mark.parametrize("cut", range(0, 9300, 311))
def test_a_batch_that_ends_early(tmp_path, cut):
    content, _ = python2_batch()
    path = tmp_path / "batch"
    path.write_bytes(content[:cut])
    check_refused("batch", read_pickled_batch, path, "labels")


def test_any_changed_byte_of_a_batch_gives_a_batch_or_a_clear_error(tmp_path):
    content, data = python2_batch(count=1)
    path = tmp_path / "batch"
    head = content.index(data.tobytes())
    rng = np.random.default_rng(5)
    refused = 0
    for place in [*range(head), *range(head + 3072, len(content))]:
        for _ in range(4):
            changed = bytearray(content)
            changed[place] = rng.integers(256)
            path.write_bytes(changed)
            try:
                images, labels = read_pickled_batch(path, "labels")
            except ConfigError:
                refused += 1
            else:
                assert images.shape[1:] == (3, 32, 32)
                assert ((labels >= 0) & (labels < 256)).all()
    assert refused > head


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [1]}, "has no key 'data'"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "has no key 'labels'"),
        ({"data": np.zeros((1, 3072), np.int32), "labels": [1]}, "'data' are an array of another dtype than uint8"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}, r"no array of shape \(n, 3072\)"),
        ({"data": [1], "labels": [1]}, "'data' are no array"),
        ({"data": np.zeros(3072, np.uint8), "labels": [1]}, r"'data' are no array of shape \(n, 3072\)"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["a"]}, "labels are no list of whole numbers"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [2**70]}, r"the opcode b'\\x8a'"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [256]}, "labels are no list of whole numbers from 0 to 255"),
    ],
)
def test_a_batch_with_other_contents(tmp_path, batch, message):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(batch | {"filenames": ["a.png"]}, 3))
    check_refused(message, read_pickled_batch, path, "labels")


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
