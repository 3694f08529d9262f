"""`afflux run --paper` and `afflux papers`: each preset starts from one command and makes two server steps."""

import re
from dataclasses import fields

import numpy as np
import pytest
from typer.testing import CliRunner

from afflux.cli import app
from afflux.sim import read_audit_log
from afflux.sim.papers import afl_table2
from afflux.sim.papers.presets.registry import all_presets, find_preset
from afflux.sim.workload.config import SimConfig
from conftest import ROOT

IMAGES = {
    "mnist": (28, 28),
    "emnist-mnist": (28, 28),
    "cifar10": (32, 32, 3),
    "cifar100": (32, 32, 3),
}
VISION = [name for name, preset in all_presets().items() if preset.data in IMAGES]
#: Small, so that a run takes a second: options of the command line win against the preset's.
SMALL = ["--num-clients", "6", "--concurrency", "4", "--refill", "1", "--batch-size", "8", "--rounds", "2"]
TABLES = {"CA2FL": ("Table 6", "Table 7"), "FADAS": ("Table 10", "Table 11")}


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The data sets in a format in which they are published, with few images."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name, shape in IMAGES.items():
        labels = np.arange(30) % 10
        images = rng.integers(0, 256, (30, *shape), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10])
    return folder


@pytest.mark.parametrize("name", VISION)
def test_each_preset_makes_two_rounds(name, data_dir, tmp_path):
    preset = find_preset(name)
    own = [] if preset.buffer_size is None else ["--buffer-size", "2"]
    own += ["--alpha", "10"] if preset.settings["partition"].value == "dirichlet" else []
    result = invoke("run", "--paper", name, "--data-dir", data_dir, "--out", tmp_path / "out", *SMALL, *own)
    assert result.exit_code == 0, result.output
    log = read_audit_log(next((tmp_path / "out" / "audit").glob("*.jsonl")))
    assert log.end.version == 2
    written = SimConfig(**log.header.config)
    small = {"num_clients", "concurrency", "refill", "batch_size", "rounds", "arrivals", "alpha", "data_dir"}
    for setting, given in preset.settings.items():
        if setting not in small:
            assert getattr(written, setting) == given.value, setting
    assert log.header.rule == preset.rule.value.partition(":")[0]
    assert log.header.options.get("server_lr") == (preset.server_lr and preset.server_lr.value)


@pytest.mark.parametrize("name", list(all_presets()))
def test_each_value_has_a_source_and_is_a_setting(name):
    preset = find_preset(name)
    settings = {field.name for field in fields(SimConfig)}
    assert set(preset.settings) <= settings
    assert all(given.source for given in preset.all_values().values())
    config = preset.config()
    assert all(getattr(config, setting) == value for setting, value in preset.values().items())
    for paper, tables in TABLES.items():
        if preset.paper.startswith(paper):
            assert preset.settings["client_lr"].source in tables


def test_presets_have_the_papers_numbers():
    """A few cells of the tables, as they are printed."""
    presets = all_presets()
    values = {name: (p.settings["client_lr"].value, p.server_lr and p.server_lr.value) for name, p in presets.items()}
    assert values["ca2fl-cnn"] == values["ca2fl-resnet18-cifar100-dir0.01-mf4"] == (0.01, 1)
    assert values["fadas-cifar10-mild-fedasync"] == (0.003, None)
    assert values["fadas-cifar10-mild-dir0.3-fedasync"] == (0.01, None)
    assert values["fadas-cifar100-mild-dir0.3-da"] == (0.1, 0.001)
    assert values["fadas-cifar10-large"] == (0.1, 0.0001)
    assert "stage_two_version=1000" in presets["wkafl-emnist"].rule.value
    assert "stage_two_version=3500" in presets["wkafl-cifar10"].rule.value
    config = presets["ca2fl-cnn"].config()
    found = (config.num_clients, config.concurrency, config.local_epochs, config.batch_size, config.weight_decay)
    assert found == (100, 20, 2, 50, 1e-4)
    assert (config.rounds, config.alpha, config.delays) == (500, 0.3, "ca2fl")


@pytest.mark.parametrize("workers", ["5/10", "20/100"])
def test_anarchic_fls_preset_is_a_run_of_its_table(workers):
    preset = find_preset(f"afl-logreg-{workers.replace('/', 'of')}")
    jobs = afl_table2.make_jobs(workers, 5, [0])
    assert preset.config() in [job.config for job in jobs]
    assert {job.spec.text for job in jobs} == {"afa_cd:buffer_size={}:server_lr=0.1".format(workers.partition("/")[0])}
    assert (preset.rule.value, preset.server_lr.value) == ("afa_cd", 0.1)


def test_options_of_the_command_line_win(data_dir, tmp_path):
    command = ["run", "--paper", "ca2fl-cnn", "--data-dir", data_dir, "--out", tmp_path / "out", *SMALL]
    result = invoke(
        *command, "--rule", "fadas:server_lr=0.5", "--buffer-size", "3", "--alpha", "9", "--client-lr", "0.02"
    )
    assert result.exit_code == 0, result.output
    header = read_audit_log(next((tmp_path / "out" / "audit").glob("*.jsonl"))).header
    assert (header.config["alpha"], header.config["client_lr"], header.config["weight_decay"]) == (9, 0.02, 1e-4)
    assert (header.rule, header.options["server_lr"], header.options["buffer_size"]) == ("fadas", 0.5, 3)


def test_errors_are_clear(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AFFLUX_DATA", raising=False)
    for arguments, message in (
        (["--paper", "ca2fl"], "unknown preset 'ca2fl'"),
        (["--paper", "ca2fl-cnn"], "give their folder with --data-dir or AFFLUX_DATA (docs/data.md)"),
        (["--paper", "ca2fl-cnn", "--data-dir", "absent"], "docs/data.md"),
        (["--paper", "ca2fl-cnn", "--data-dir", "."], "docs/data.md"),
    ):
        result = invoke("run", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not list(tmp_path.glob("runs/*")), "an error leaves no run folder"


def test_the_list():
    lines = invoke("papers").stdout.splitlines()
    assert len(lines) == 1 + len(all_presets())
    assert [line.split()[0] for line in lines[1:]] == list(all_presets())
    (line,) = [line for line in lines if line.startswith("fadas-cifar10-large-da ")]
    assert line.split()[1:7] == ["cifar10", "resnet18-bn", "fadas", "5", "0.1", "0.001"]
    assert line.endswith("FADAS, ICML 2024, Table 10")
    text = invoke("papers", "ca2fl-cnn").stdout
    assert "client_lr     0.01  [Table 6]" in text
    assert "551,786 parameters; which of the two the paper ran is open" in text
    assert invoke("papers", "nothing").exit_code == 2


def test_the_page_has_all_presets():
    text = (ROOT / "docs" / "papers.md").read_text()
    named = {
        name for name in re.findall(r"`([a-z0-9.-]+)`", text) if name.startswith(("ca2fl-", "fadas-", "wkafl-", "afl-"))
    }
    suffixes = {"", *re.findall(r"`(-[a-z0-9-]+)`", text)}
    assert named <= set(all_presets())
    assert set(all_presets()) <= {name + suffix for name in named for suffix in suffixes}
