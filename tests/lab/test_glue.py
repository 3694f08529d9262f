"""GLUE's TSV files: the published columns of each task, and errors that name file and line."""

import pytest

from afflux.lab.tasks.lora_task import TASKS, read_glue
from conftest import check_refused

FILES = {
    "rte": ("RTE", "index\tsentence1\tsentence2\tlabel\n", ('0\tA "quoted\n', '0\tA "b\tC\tnot_entailment\n')),
    "mrpc": ("MRPC", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n", ("1\t7\n", '1\t7\t8\tA "b\tC\r\n')),
    "sst2": ("SST-2", "sentence\tlabel\n", ("A\n", 'A "b\t1\n')),
}


def write(folder, name, where=""):
    own, header, (_, line) = FILES[name]
    place = folder / where / own
    place.mkdir(parents=True)
    (place / "train.tsv").write_text(header + line * 3, "utf-8")
    (place / "dev.tsv").write_text(header + line, "utf-8")
    return place


@pytest.mark.parametrize("where", ["", "glue", "GLUE"])
@pytest.mark.parametrize("name", FILES)
def test_the_published_columns(name, where, tmp_path):
    write(tmp_path, name, where)
    train, test = read_glue(name, tmp_path)
    pair = ('A "b',) if name == "sst2" else ('A "b', "C")
    assert train.sentences == [pair] * 3
    assert train.labels.tolist() == [1] * 3
    assert test.sentences == [pair]


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name, tmp_path):
    place = write(tmp_path, name)
    _, header, (short, line) = FILES[name]
    for content, message in (
        (header + line + short, "in line 3"),
        (header, "has no example"),
        ("a\tb\n", "has no column"),
        (header + line.replace("not_entailment", "2").replace("1\t7", "2\t7").replace("b\t1", "b\t2"), "has the label"),
    ):
        (place / "dev.tsv").write_text(content, "utf-8")
        check_refused(message, read_glue, name, tmp_path)
    (place / "dev.tsv").unlink()
    check_refused(r"has no dev\.tsv", read_glue, name, tmp_path)


def test_names():
    assert list(TASKS) == list(FILES)
