"""The environment variables of the engine, and the absence of side effects of an import."""

import os
import sys

import pytest

from afflux import _engine, ops
from processes import run_python


@pytest.mark.parametrize("name", ["AVX512", "avx1024", "cuda", " "])
def test_an_unknown_isa_raises_at_first_use(name):
    done = run_python("-c", "import afflux; afflux.ops.backends()", AFFLUX_ISA=name)
    assert done.returncode == 1
    assert f"UnavailableError: AFFLUX_ISA asks for '{name}', which is unknown here; known: " in done.stderr


def test_the_command_line_says_so_in_one_line():
    pytest.importorskip("typer")
    done = run_python("-m", "afflux", "backends", AFFLUX_ISA="x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: AFFLUX_ISA asks for 'x'")
    assert "Traceback" not in done.stderr


def test_import_does_no_work():
    """No thread, no torch, no decision on the instruction set; results load their libraries when they are used."""
    code = (
        "import threading, sys, os, afflux\n"
        "assert threading.active_count() == 1\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
        "assert not {'torch', 'sklearn', 'matplotlib', 'typer', 'rich'} & set(sys.modules)\n"
        "import afflux.lab.results.simulation_results\n"
        "assert not {'torch', 'scipy', 'matplotlib', 'pandas', 'jinja2', 'rich'} & set(sys.modules)\n"
    )
    start = "import os, numpy; before = len(os.listdir('/proc/self/task'))\n"
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs /proc")
    done = run_python("-c", start + code, AFFLUX_ISA="nonsense")
    assert done.returncode == 0, done.stderr


def test_helpers_are_kept_for_the_next_call():
    """Made by the first call that needs them, as many as it needs and no more; a forked child makes its own."""
    code = """
import os, numpy as np
from afflux import ops
x = np.ones(300_000, np.float32)
before = len(os.listdir('/proc/self/task'))
def helpers(num_threads):
    assert ops.gram([x], num_threads=num_threads) == len(x)
    return len(os.listdir('/proc/self/task')) - before
assert [helpers(n) for n in (1, 2, 2, 4, 3, 1)] == [0, 1, 1, 3, 3, 3]
before = 1
child = os.fork()
if child == 0:
    os._exit([helpers(n) for n in (1, 2, 3, 2)] != [0, 1, 2, 2])
assert os.waitpid(child, 0)[1] == 0
"""
    if not hasattr(os, "fork") or not os.path.isdir("/proc/self/task"):
        pytest.skip("needs fork and /proc")
    done = run_python("-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr


def test_threads_help_where_they_are_worth_it():
    code = """
import os, sys, numpy as np
from afflux import ops
before = len(os.listdir("/proc/self/task"))
def helpers(size, num_threads):
    vectors, out, weights = [np.ones(size, np.float32)] * 4, np.ones(size, np.float32), np.ones(4)
    ops.apply(ops.Pass(vectors[0], out, ops.Combine(vectors, weights)), num_threads=num_threads)
    return len(os.listdir("/proc/self/task")) - before
print(*(helpers(*case) for case in ((1_000_000, 1), (30_000, 3), (60_000, 3), (1_000_000, 3))))
"""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs /proc")
    for each, expected in (("", "0012"), ("1", "0222"), ("5000000", "0002"), ("10000000", "0001")):
        done = run_python("-c", code, AFFLUX_THREAD_BYTES=each)
        assert done.stdout.split() == list(expected), (each, done.stderr)
    for wrong in ("2 MB", "0", str(2**63), str(-(2**64))):
        done = run_python("-c", code, AFFLUX_THREAD_BYTES=wrong)
        said = f"AFFLUX_THREAD_BYTES is '{wrong}', must be a number of bytes from 1 to {2**63 - 1}"
        assert f"AffluxError: {said}\n" in done.stderr


CPU_V1 = "31 23 0:29 {top} /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
OTHER_V1 = "32 23 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
V2 = "30 23 0:28 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cpus"),
    [
        ("0::/\n", V2.format(top="/"), {"cpu.max": "200000 100000"}, 2),
        ("0::/\n", V2.format(top="/"), {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", V2.format(top="/"), {"cpu.max": "10000 100000"}, 1),
        ("0::/\n", V2.format(top="/"), {"cpu.max": "max 100000"}, 0),
        ("0::/\n", V2.format(top="/"), {}, 0),
        ("0::/a/b\n", V2.format(top="/"), {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b\n", V2.format(top="/"), {"a/b/cpu.max": "100000 100000", "a/cpu.max": "300000 100000"}, 1),
        ("0::/docker/1\n", V2.format(top="/docker/1"), {"cpu.max": "400000 100000"}, 4),
        ("0::/docker/12\n", V2.format(top="/docker/1"), {"cpu.max": "400000 100000"}, 4),
        ("0::/../../other\n", V2.format(top="/"), {"cpu.max": "400000 100000"}, 4),
        ("4:cpu,cpuacct:/\n0::/\n", CPU_V1.format(top="/"), {"cpu/cpu.cfs_quota_us": "-1"}, 0),
        ("4:cpuset:/\n3:cpu:/x\n", OTHER_V1 + CPU_V1.format(top="/"), {"cpu/x/cpu.cfs_quota_us": "250000"}, 3),
        ("3:cpu:/kube/1\n", CPU_V1.format(top="/kube/1"), {"cpu/cpu.cfs_quota_us": "100000"}, 1),
        ("4:cpuset:/x\n", OTHER_V1, {"cpuset/x/cpu.cfs_quota_us": "100000"}, 0),
        ("garbage\n::\n0::\n", "garbage\n- cgroup2\n", {}, 0),
    ],
)
def test_quotas_of_control_groups(groups, mounts, files, cpus, tmp_path, monkeypatch):
    """Versions 1 and 2, of a container or of a group above; the default number of threads follows."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/vda rw\n" + mounts)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        if name.endswith("quota_us"):
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert _engine.cpu_quota(str(tmp_path)) == cpus
    monkeypatch.setattr(sys.modules["afflux.ops.backends"], "_cpu_quota", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    assert ops.default_threads() == (min(cpus, 3) or 3)
