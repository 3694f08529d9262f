"""`afflux selftest`, and the core's commands where no extra is installed."""

import json
import subprocess
import sys

import numpy as np
import pytest

from afflux import Server, ops
from afflux.cli import selftest
from afflux.rules import ca2fl
from afflux.selftest import digest
from commands import invoke
from conftest import ROOT, found

#: All modules that the extras bring.
EXTRAS = ["click", "jinja2", "matplotlib", "pandas", "psutil", "rich", "safetensors", "scipy", "sklearn", "torch"]
EXTRAS += ["typer", "zarr"]
BLOCKED = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS}))
import afflux
print(sorted({{"secrets", "zipfile", "afflux.cli", "afflux.sim"}} & set(sys.modules)))  # import afflux is short
from afflux.cli import main
import json
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    code = 0
    print("$")
    try:
        main()
    except SystemExit as end:
        code = end.code
    print("=", code)
"""


@pytest.fixture
def quick(monkeypatch):
    """The bits are those of test_bits.py, and one kill is enough here."""
    monkeypatch.setattr(digest, "parts", lambda threads: digest.golden() | {"weights": digest.weights()})
    monkeypatch.setattr(selftest, "KILLS", (20,))
    monkeypatch.setattr(selftest, "speed", lambda: "not measured")


def run(*arguments):
    return invoke("selftest", *arguments)


def test_a_sound_installation_passes_and_the_report_is_also_in_the_file(quick, tmp_path):
    result = run("--out", tmp_path / "report.txt")
    assert result.exit_code == 0, result.stdout
    assert (tmp_path / "report.txt").read_text() == result.stdout
    names = [backend.name for backend in ops.backends() if backend.device == "cpu" and backend.runs]
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{len(names) + 4} tests passed, 0 failed"
    for name in names:
        assert any(line.startswith(f"bits, {name} ") and "all equal" in line for line in lines)


def test_a_folder_in_place_of_the_file(tmp_path):
    result = run("--out", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"cannot write {tmp_path}: " in result.stderr


def test_other_bits_a_lost_push_and_a_slow_choice_fail(quick, monkeypatch):
    """Each of the tests can fail, and the others still run."""
    monkeypatch.setattr(digest, "parts", lambda threads: digest.golden() | {"inner": "0", "fedbuff": "0"})
    monkeypatch.setattr(selftest.pushes, "state_digest", lambda server: str(id(server)))
    monkeypatch.setattr(selftest, "FLAGS", {"faster": {"fast"}})
    monkeypatch.setattr(selftest, "cpuinfo", lambda: "flags : slow fast\n")
    monkeypatch.delenv("AFFLUX_ISA", raising=False)
    result = run()
    assert result.exit_code == 1
    for text in (
        " runs, but the processor has faster",
        "FAILED: other bits than the golden ones: inner, fedbuff",
        "FAILED: other bits than in memory",
        "FAILED: other bits than without kills",
    ):
        assert text in result.stdout
    assert " 1 tests passed, " in f" {result.stdout.splitlines()[-1]}"


def test_an_unknown_device_and_a_missing_gpu_are_named():
    assert "error: --device is 'tpu', must be cpu or cuda" in run("--device", "tpu").stderr
    if not ops.backends()[-1].runs:
        assert "error: --device cuda: " in run("--device", "cuda").stderr


def test_the_core_commands_need_no_extra(tmp_path):
    """One process without the extras runs them one after the other."""
    with Server(ca2fl(buffer_size=1), np.zeros(3), num_clients=9, store=tmp_path / "store") as server:
        server.push(client=4, version=0, update=np.ones(3))
    store = str(tmp_path / "store")
    plan = ["plan", "--rule", "ca2fl", "--clients", "90", "--params", "1_000"]
    commands = [
        ["--version"],
        ["--help"],
        ["backends"],
        ["rules", "ca2fl"],
        ["papers"],
        ["store", "info", store],
        ["store", "check", store, "--json"],
        ["store", "repair", store, "--yes"],
        ["store", "export", store, "--clients", "4", "--out", str(tmp_path / "rows.npz")],
        [*plan, "--json"],
        ["selftest", "--help"],
        [*plan, "--rule", "fedbuff"],
        ["plan", "--rule", "fedbuff", "--params", "0"],
        ["store", "info", str(tmp_path / "nothing")],
        ["run", "--rule", "fedbuff"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps(commands)], capture_output=True, text=True, check=True
    )
    loaded, *texts = done.stdout.split("$\n")
    version, listing, *others = (text.rpartition("=") for text in texts)
    assert loaded == "[]\n"
    assert [code.strip() for *_, code in (version, listing, *others)] == ["0"] * 11 + ["2"] * 3 + [
        "afflux: run needs typer: pip install 'afflux[lab]'"
    ]
    assert "store" in listing[0]
    assert json.loads(others[4][0])["clients"] == 1
    assert "memory_bytes" in json.loads(others[7][0])
    assert "afflux selftest --out report.txt" in others[8][0]
    for message in ("--rule is given twice", "argument --params: invalid whole number from 1 on value: '0'", "error: "):
        assert message in done.stderr
    assert np.load(tmp_path / "rows.npz")["clients"].tolist() == [4]


def test_without_torch_a_file_that_imports_it_is_skipped():
    code = "import sys, pytest; sys.modules['torch'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    file = found("test_edges.py")
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", "--collect-only", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "torch is not installed" in done.stdout
    assert "error" not in done.stdout
