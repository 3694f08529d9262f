"""What the benchmark refuses, lists, and does without a compiler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.measure import native_probes
from benching import D, bench, bench_process, cache  # noqa: F401
from conftest import ROOT, check_error

pytest.importorskip("torch")


@pytest.mark.parametrize("arguments", [("--rows", "fedbuff,fedbuf"), ("--rows", "")])
def test_unknown_row(arguments):
    done = bench(*arguments)
    assert done.returncode == 2
    assert "known rows: all, scaling, mf-ca2fl, peers, adapters, simulators, hosts, ray, ingest" in done.stderr
    assert ("unknown: fedbuf;" in done.stderr) == (arguments[1] != "")


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="available memory is unknown here")
def test_refuses_what_does_not_fit():
    done = bench("-d", 10**13)
    assert done.returncode == 2
    assert "GB of memory" in done.stderr
    assert "would fit" in done.stderr


def test_refuses_a_folder_that_is_not_there(tmp_path):
    done = bench("--quick", "--json", tmp_path / "none" / "out.json")
    assert done.returncode == 2
    assert "no folder" in done.stderr


def test_refuses_an_instruction_set_that_is_not_there():
    done = bench("--quick", "--isa", "sse9")
    assert done.returncode == 2
    assert "sse9" in done.stderr


@pytest.mark.parametrize("option", ["--list", "--help"])
def test_lists_and_helps(option):
    done = bench(option)
    assert done.returncode == 0
    assert "fedbuff" in done.stdout
    assert "push" in done.stdout
    listed = {"torch addmv_", "fadas", "torch fused Adam", "wkafl", "afflux inner"}
    assert all(name in done.stdout for name in (listed if option == "--list" else {"python -m bench --quick"}))
    assert option == "--list" or "figures say nothing about speed" in " ".join(done.stdout.replace("│", " ").split())


def test_tiny_vectors():
    done = bench("--quick", "-d", 1, "-M", 1, "--rows", "ca2fl,fadas,wkafl")
    assert done.returncode == 0, done.stderr
    assert "fedbuff" not in done.stdout


def test_without_a_compiler_the_run_goes_on(monkeypatch, tmp_path):
    path = tmp_path / "out.json"
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    done = bench_process("--quick", "--rows", "gram", "-d", D, "-M", 3, "--json", path)
    assert done.returncode == 0, done.stderr
    assert "no native probes" in done.stdout
    (only,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert not [p for p in only["probes"] if p["name"].startswith("native")]
    assert only["limits"]["gram"]["gbps"] > 0


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(3)'")
    check_error("failed", native_probes.library.__wrapped__, error=native_probes.MissingCompiler)
    assert not list((tmp_path / "afflux").glob("*.so"))


def test_the_benchmark_on_a_gpu_needs_neither_typer_nor_rich_nor_psutil():
    """A bare machine with a GPU may lack them."""
    lines = [
        "import sys",
        "sys.modules |= dict.fromkeys(['typer', 'rich', 'psutil', 'matplotlib'])",
        "from bench import cuda",
        "from bench.measure import machine",
        "assert cuda.ROWS and machine.describe()['memory'] is None and machine.available_bytes() is None",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
