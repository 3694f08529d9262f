"""`afflux run --paper` and `afflux papers`: the settings of each preset, and two server steps of one of each kind."""

import os
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import typer

import own_tasks
from afflux.cli.common import parse_rules
from afflux.cli.lab import simulate
from afflux.cli.lab.settings import rules_of_preset
from afflux.lab import read_audit_log
from afflux.lab.presets.registry import all_presets, find_preset
from afflux.sim.models.networks import NETWORKS
from afflux.sim.workload.config import SimConfig
from bench.papers.all_tables import TABLES
from bench.papers.reproduction import job_of
from commands import check_exit, invoke
from conftest import ROOT
from made_runs import run
from pairwise import soak

IMAGES = {"mnist": (28, 28), "emnist-mnist": (28, 28), "cifar10": (32, 32, 3), "cifar100": (32, 32, 3)}
#: The others need the extra lora: test_lora.py runs them.
OF_PAPERS_MODELS = [name for name, preset in all_presets().items() if preset.model != "lora"]
#: Each data set with each of its models, each rule and each optimizer of the clients; ResNet-18 once for each paper.
#: The others run in soak.
OF_EACH_KIND = ["ca2fl-cnn-async", "ca2fl-cnn-mf4", "ca2fl-cnn-fedasync", "ca2fl-resnet18", "fadas-cifar100-large-da"]
OF_EACH_KIND += ["wkafl-emnist", "wkafl-cifar10", "afl-logreg-5of10", "afl-cnn-5of10", "afl-lstm"]
#: Small, so that a run takes a second: options of the command line win against the preset's.
SMALL = ["--batch-size", "8", "--rounds", "2"]
EVENTS = ["--concurrency", "4", "--refill", "1"]
CLIENTS = ["--num-clients", "6"]
#: Presets whose client learning rate is not legible in our copies of the tables.
DECIDED = {
    "ca2fl-resnet18-fedasync-polynomial",
    "fadas-cifar100-large-da",
    *(f"fadas-cifar100-large-dir0.3{suffix}" for suffix in ("", "-da", "-fedbuff")),
}
#: CA2FL's tables 6 and 7 and FADAS's tables 10 and 11, copied a second time, as they are printed; ?: not legible.
CA2FL_TABLE_6 = """
ca2fl-cnn                        0.01 1.0  0.01 1.0  0.01 1.0  0.01 1.0
ca2fl-resnet18                   0.01 1.0  0.01 1.0  0.01 1.0  0.01 1.0
ca2fl-cnn-dir0.1                 0.01 1.0  0.01 1.0  0.01 1.0  0.01 1.0
ca2fl-resnet18-dir0.1            0.01 1.0  0.01 1.0  0.01 1.0  0.01 1.0
ca2fl-resnet18-cifar100          0.01 1.0  0.01 1.0  0.01 1.0  0.01 1.0
ca2fl-resnet18-cifar100-dir0.01  0.01 1.0  0.01 1.0  0.01 1.0  0.01 1.0
"""
CA2FL_METHODS = ("-async", "", "-mf8", "-mf4")
FADAS_TABLES = """
fadas-cifar10-mild            0.003 1  0.03 1  0.1 0.0003  0.1 0.001
fadas-cifar10-mild-dir0.3     0.01 1   0.03 1  0.1 0.0003  0.1 0.001
fadas-cifar100-mild           0.01 1   0.03 1  0.1 0.0003  0.1 0.001
fadas-cifar100-mild-dir0.3    0.01 1   0.03 1  0.1 0.0003  0.1 0.001
fadas-cifar10-large           0.003 1  0.03 1  0.1 0.0001  0.1 0.001
fadas-cifar10-large-dir0.3    0.003 1  0.03 1  0.1 0.0001  0.1 0.001
fadas-cifar100-large          ? 1      0.03 1  0.1 0.0001  ? 0.001
fadas-cifar100-large-dir0.3   ? ?      ? ?     ? ?         ? ?
fadas-rte                     0.01 1   0.01 1  0.01 0.005  0.01 0.01
fadas-mrpc                    0.001 1  0.01 1  0.01 0.001  0.01 0.002
fadas-sst2                    0.001 1  0.001 1 0.1 0.0005  0.1 0.001
"""
FADAS_METHODS = ("-fedasync", "-fedbuff", "", "-da")
#: Model -> eta_l, rho, alpha_t of the constant update; eta_l, rho, alpha_t, beta of the polynomial one.
CA2FL_TABLE_7 = {"ca2fl-cnn": "0.01 1.0 0.3  0.01 1.0 0.5 0.3", "ca2fl-resnet18": "0.01 0.1 ?  ? 0.1 0.3 0.3"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The data sets in a format in which they are published, with few images."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name, shape in IMAGES.items():
        labels = np.arange(30) % 10
        images = rng.integers(0, 256, (30, *shape), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10])
    own_tasks.write_speeches(folder, {role: [f"The same words {role} again and again."] * 40 for role in "ABC"})
    return folder


#: Server steps after which the presets have learned whose data are often at hand (MNIST, CIFAR-10) and whose step takes
#: less than five seconds: `ca2fl-cnn` takes seven (Xeon), `afl-cnn` six. Not here: the FedAsync presets of `ca2fl-cnn`,
#: whose step is one arrival of .5 s; 300 of them are not enough.
LEARNS = {"wkafl-cifar10": 3000, "wkafl-cifar10-150": 3000, "wkafl-cifar10-300": 6000, "afl-logreg-5of10": 6}
LEARNS["afl-logreg-20of100"] = 6


@pytest.mark.soak
@pytest.mark.parametrize("name", LEARNS)
def test_a_preset_learns(name):
    """With its own rate and the inputs' scale: below the loss of equal probabilities."""
    folder, data = os.environ.get("AFFLUX_DATA"), find_preset(name).data
    if not folder or not list(Path(folder).glob(f"{data}*")):
        pytest.skip(f"needs {data} in the folder AFFLUX_DATA")
    preset = find_preset(name)
    (rule,), buffer_size, server_lr = rules_of_preset(name, None, [], None, None)
    (spec,) = parse_rules([rule], buffer_size=buffer_size, server_lr=server_lr)
    config = preset.config(arrivals=LEARNS[name] * (buffer_size or 1), rounds=0, eval_every=10**9)
    assert run(spec, 0, config).evaluations[-1].loss < np.log(10) - 0.1


OTHERS = [name for name in OF_PAPERS_MODELS if name not in OF_EACH_KIND]


@pytest.mark.parametrize("name", [*OF_EACH_KIND, *(row for name in OTHERS for row in soak(name))])
def test_a_preset_makes_two_rounds(name, data_dir, tmp_path):
    preset = find_preset(name)
    own = [] if preset.buffer_size is None else ["--buffer-size", "2"]
    own += ["--alpha", "10"] if "alpha" in preset.settings else []
    own += ["--local-steps", "2"] if preset.model == "char-lstm" else []
    own += EVENTS if "protocol" not in preset.settings else []
    own += CLIENTS if preset.data != "shakespeare" else []
    check_exit(0, "run", "--paper", name, "--data-dir", data_dir, "--out", tmp_path / "out", *SMALL, *own)
    log = read_audit_log(next((tmp_path / "out" / "audit").glob("*.jsonl")))
    assert log.end.version == 2


def test_presets_of_each_kind_make_two_rounds():
    presets = all_presets()
    for kind in (
        lambda preset: (preset.model, preset.paper),
        lambda preset: (preset.data, preset.model),
        lambda preset: preset.rule.value.partition(":")[0],
        lambda preset: "client_optimizer" in preset.settings,
        lambda preset: "protocol" in preset.settings,
    ):
        assert {kind(presets[name]) for name in OF_EACH_KIND} == {kind(presets[name]) for name in OF_PAPERS_MODELS}


@pytest.fixture
def commanded(monkeypatch):
    """Return the rules and settings of the runs that a command would make."""

    def arguments(*command):
        calls = []

        def make_runs(specs, seeds, config, *_, **options):
            calls.append((specs, config))
            raise typer.Exit

        monkeypatch.setattr(simulate, "make_runs", make_runs)
        result = invoke(*command)
        assert (result.exit_code, len(calls)) == (0, 1), result.output
        return calls[0]

    return arguments


@pytest.mark.parametrize("name", list(all_presets()))
def test_the_command_has_the_values_of_the_preset(name, commanded):
    preset = find_preset(name)
    (spec,), config = commanded("run", "--paper", name, "--data-dir", "there")
    for setting, given in preset.settings.items():
        assert getattr(config, setting) == given.value, setting
    rule = spec.build()
    assert rule.name == preset.rule.value.partition(":")[0]
    options = dict(spec.options)
    for option in ("server_lr", "buffer_size"):
        given = getattr(preset, option)
        assert options.get(option) == (given and given.value)
    assert rule.buffer_size == (1 if preset.buffer_size is None else preset.buffer_size.value)


@pytest.mark.parametrize("name", list(all_presets()))
def test_each_value_has_a_source_and_is_a_setting(name):
    preset = find_preset(name)
    settings = {field.name for field in fields(SimConfig)}
    assert set(preset.settings) <= settings
    assert all(given.source for given in preset.all_values().values())
    config = preset.config()
    assert all(getattr(config, setting) == value for setting, value in preset.values().items())
    assert (name in DECIDED) is ("not legible" in preset.settings["client_lr"].source)


def rates(name):
    preset = all_presets().get(name)
    return preset and (preset.settings["client_lr"].value, preset.server_lr and preset.server_lr.value)


def printed(text):
    return None if text == "?" else float(text)


@pytest.mark.parametrize(("table", "methods"), [(CA2FL_TABLE_6, CA2FL_METHODS), (FADAS_TABLES, FADAS_METHODS)])
def test_all_rates_are_the_tables(table, methods):
    rows = {name: [printed(text) for text in cells] for name, *cells in map(str.split, table.strip().splitlines())}
    for name, cells in rows.items():
        for method, client_lr, server_lr in zip(methods, cells[::2], cells[1::2], strict=True):
            found = rates(name + method)
            if method == "-fedasync":
                # The rule has no rate of the server: the 1 of the table is its only value. Rates differ between rows.
                assert found == (None if client_lr is None else (client_lr, None)), name
                continue
            assert (name + method in DECIDED) is (client_lr is None)
            if client_lr is None:
                # The rates of the row above, which all rows of these delays have.
                client_lr, above = rates("fadas-cifar10-large-dir0.3" + method)
                server_lr = above if server_lr is None else server_lr
            assert found == (client_lr, server_lr), name + method
    (paper,) = {name.partition("-")[0] for name in rows}
    of_paper = {name for name in all_presets() if name.startswith(f"{paper}-")}
    others = of_paper - {name + method for name in rows for method in methods}
    assert all(paper == "ca2fl" and "-fedasync" in name for name in others), "of CA2FL's Table 7"


def test_fedasync_has_the_numbers_of_ca2fls_table_7():
    for name, row in CA2FL_TABLE_7.items():
        lr, rho, alpha, own_lr, own_rho, own_alpha, beta = map(printed, row.split())
        constant, polynomial = (all_presets().get(name + suffix) for suffix in ("-fedasync", "-fedasync-polynomial"))
        assert (constant is None) is (alpha is None)
        if constant is not None:
            assert constant.rule.value == f"fedasync:alpha={alpha}:staleness=constant"
            assert (constant.settings["client_lr"].value, constant.settings["mu"].value) == (lr, rho)
        assert polynomial.rule.value == f"fedasync:alpha={own_alpha}:staleness=polynomial({beta})"
        assert polynomial.settings["client_lr"].value == (lr if own_lr is None else own_lr)
        assert polynomial.settings["mu"].value == own_rho


def values(name, *settings):
    config = find_preset(name).config()
    return tuple(getattr(config, setting) for setting in settings)


def test_settings_are_those_of_the_papers_texts():
    clients = ("num_clients", "concurrency", "refill", "local_epochs", "batch_size", "weight_decay", "rounds")
    assert values("ca2fl-cnn", *clients, "alpha", "delays") == (100, 20, 10, 2, 50, 1e-4, 500, 0.3, "ca2fl")
    assert values("fadas-cifar10-mild-dir0.3", *clients, "alpha") == (100, 20, 10, 2, 50, 1e-4, 500, 0.3)
    assert values("fadas-cifar10-large", *clients, "alpha") == (50, 25, 5, 2, 50, 1e-4, 500, 0.1)
    assert values("fadas-rte", *clients, "alpha") == (10, 5, 3, 1, 32, 1e-4, 500, 0.6)
    for name, preset in all_presets().items():
        if name.startswith("fadas-"):
            assert preset.settings["delays"].value == ("fadas-large" if "-large" in name else "fadas-mild")
    # Anarchic FL: local steps, batch size, rate of the clients, rounds.
    steps = ("local_steps", "batch_size", "client_lr", "rounds")
    assert values("afl-cnn-5of10", *steps, "num_clients", "classes") == (5, 500, 0.1, 10_000, 10, 1)
    assert values("afl-lstm", *steps) == (50, 10, 0.8, 300)
    assert find_preset("afl-lstm").server_lr.value == 50 * 0.8


@pytest.mark.parametrize(
    ("data", "levels", "rate", "rule"),
    [
        ("emnist", ["1000/10", "3000/20", "3000/10"], 0.005, "beta=10:gamma=0.1:clip=100:stage_two_clip=10"),
        ("cifar10", ["1000/20", "3000/20", "3000/10"], 0.0005, "beta=50:gamma=0.01:clip=70:stage_two_clip=5"),
    ],
)
def test_wkafls_settings(data, levels, rate, rule):
    """P/K of its Table 2, all other values from the authors' scripts."""
    version = {"emnist": 1000, "cifar10": 3500}[data]
    for suffix, level in zip(("", "-150", "-300"), levels, strict=True):
        name = f"wkafl-{data}{suffix}"
        preset = find_preset(name)
        assert preset.rule.value == f"wkafl:alpha=0.1:sim_min=0.3:{rule}:stage_two_version={version}"
        p, k = map(int, level.split("/"))
        assert values(name, "num_clients", "concurrency", "refill") == (p, p, k)
        assert (preset.buffer_size.value, preset.server_lr.value) == (k, rate)
        own = (4, 5000, 50 * k) if data == "emnist" else (8, 10_000, 100 * k)
        assert values(name, "batch_size", "rounds", "eval_every") == own


@pytest.mark.parametrize("workers", ["5/10", "20/100"])
def test_anarchic_fls_preset_is_a_run_of_its_table(workers):
    preset = find_preset(f"afl-logreg-{workers.replace('/', 'of')}")
    cells = [cell for cell in TABLES["afl-table2"].cells if cell.name.startswith(f"{workers}, 5 steps")]
    jobs = [job_of(cell, 0) for cell in cells]
    own = preset.config(eval_every=jobs[0].config.eval_every)  # the table is evaluated in each round
    assert own in [job.config for job in jobs]
    assert {job.spec.text for job in jobs} == {"afa_cd:buffer_size={}:server_lr=0.1".format(workers.partition("/")[0])}
    assert (preset.rule.value, preset.server_lr.value) == ("afa_cd", 0.1)


def test_options_of_the_command_line_win(data_dir, tmp_path):
    command = ["run", "--paper", "ca2fl-cnn", "--data-dir", data_dir, "--out", tmp_path / "out"]
    own = ["--rule", "fadas:server_lr=0.5", "--buffer-size", "3", "--alpha", "9", "--client-lr", "0.02"]
    check_exit(0, *command, *SMALL, *EVENTS, *CLIENTS, *own)
    header = read_audit_log(next((tmp_path / "out" / "audit").glob("*.jsonl"))).header
    assert (header.config["alpha"], header.config["client_lr"], header.config["weight_decay"]) == (9, 0.02, 1e-4)
    assert (header.rule, header.options["server_lr"], header.options["buffer_size"]) == ("fadas", 0.5, 3)


#: Enough clients and arrivals for a buffer of ten.
MORE = ["--rounds", "0", "--arrivals", "12", "--num-clients", "14", "--partition", "iid"]


@pytest.mark.parametrize(
    ("own", "rules"),
    [
        ([], ["ca2fl:server_lr=1.0", "fedbuff", "fedasync"]),
        (["--rules", "fadas:server_lr=0.5,fedbuff:buffer_size=4"], ["fadas:server_lr=0.5", "fedbuff:buffer_size=4"]),
        (["--server-lr", "0.5", "--buffer-size", "2"], ["ca2fl", "fedbuff", "fedasync"]),
    ],
)
def test_several_rules_in_the_setting_of_a_paper(own, rules, commanded):
    specs, config = commanded("compare", "--paper", "ca2fl-cnn", *SMALL[:2], *EVENTS, *MORE, *own)
    assert [spec.label for spec in specs] == rules
    assert config.weight_decay == 1e-4
    assert config.alpha == SimConfig.alpha, "the value of the preset, which iid does not read"
    for spec in specs:
        options = dict(spec.options)
        size = 4 if "buffer_size=4" in spec.label else 2 if "--buffer-size" in own else 10
        assert options.get("buffer_size", size) == size
        if spec.name != "fedasync" and "--server-lr" in own:
            assert options["server_lr"] == 0.5


def test_errors_are_clear(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AFFLUX_DATA", raising=False)
    for arguments, message in (
        (["--paper", "ca2fl"], "unknown preset 'ca2fl'"),
        (["--paper", "ca2fl-cnn"], "give their folder with --data-dir or AFFLUX_DATA (docs/reference/data.md)"),
        (["--paper", "ca2fl-cnn", "--data-dir", "absent"], "docs/reference/data.md"),
        (["--paper", "ca2fl-cnn", "--data-dir", "."], "docs/reference/data.md"),
    ):
        result = check_exit(2, "run", *arguments)
        assert message in result.stderr
    assert not list(tmp_path.glob("runs/*")), "an error leaves no run folder"


def test_the_list():
    lines = invoke("papers").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(all_presets())
    (line,) = [line for line in lines if line.startswith("fadas-cifar10-large-da ")]
    assert re.fullmatch(r"\S+ +ResNet-18 on cifar10, Dir\(0\.1\), large delays +fadas", line)
    text = invoke("papers", "ca2fl-cnn").stdout
    assert "client_lr     0.01  [Table 6]" in text
    assert "551,786 parameters; which of the two the paper ran is open" in text
    assert invoke("papers", "nothing").exit_code == 2


def test_the_page_has_all_presets():
    text = (ROOT / "docs" / "reference" / "presets.md").read_text()
    named = {
        name for name in re.findall(r"`([a-z0-9.-]+)`", text) if name.startswith(("ca2fl-", "fadas-", "wkafl-", "afl-"))
    }
    suffixes = {"", *re.findall(r"`(-[a-z0-9-]+)`", text)}
    assert named <= {*all_presets(), *TABLES, *NETWORKS}
    assert set(all_presets()) <= {name + suffix for name in named for suffix in suffixes}
