"""Facts about the machine and the software, without host name, user name or paths."""

import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from afflux import __version__, _engine, ops

try:
    import psutil
except ModuleNotFoundError:  # on a bare machine, where the GPU's benchmark runs without it
    psutil = None

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CGROUP = Path("/sys/fs/cgroup")


def text_of(file: Path) -> str:
    """Return the text of a system's file; empty if this system has no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def cache_bytes() -> dict[str, int]:
    """Return the sizes of the caches L1d, L2 and L3 of one core, by name; empty if the system does not report them."""
    sizes = {}
    for index in sorted(CACHES.glob("index*")):
        level, kind, size = (text_of(index / name) for name in ("level", "type", "size"))
        if size and kind != "Instruction":
            unit = {"K": 2**10, "M": 2**20}.get(size[-1])
            number = int(size[:-1]) * unit if unit else int(size)
            sizes[f"L{level}{'d' if kind == 'Data' else ''}"] = number
    return sizes


def last_level() -> int:
    """Return the bytes of the largest cache; a guess if the system does not report them."""
    return max(cache_bytes().values(), default=2**25)


def holds(amount: int) -> str:
    """Return the name of the smallest cache that holds so many bytes, or memory.

    Between one and four times the last cache, a part of the bytes is in this cache: "cache and memory".
    """
    sizes = cache_bytes()
    beyond = "memory" if amount >= 4 * max(sizes.values(), default=0) else "cache and memory"
    return min((name for name, size in sizes.items() if amount <= size), key=sizes.__getitem__, default=beyond)


def others_cpu() -> float | None:
    """Return the seconds of CPU time that all other processes used since the machine started; None if unknown."""
    if psutil is None:
        return None
    times = psutil.cpu_times()._asdict()  # Linux counts the time of a guest as time of its user
    busy = sum(seconds for name, seconds in times.items() if name not in ("idle", "iowait", "guest", "guest_nice"))
    return float(busy) - time.process_time()


def memory_bytes() -> int | None:
    return psutil and int(psutil.virtual_memory().total)


def available_bytes() -> int | None:
    """Return the bytes that this process may still allocate, within its cgroup's limit; None if unknown."""
    if psutil is None:
        return None
    available = int(psutil.virtual_memory().available)
    limit, used = (text_of(CGROUP / f"memory.{name}") for name in ("max", "current"))
    return available if limit in ("", "max") else min(available, max(0, int(limit) - int(used)))


def huge_pages() -> str | None:
    """Return the system's setting for transparent huge pages."""
    match = re.search(r"\[(\w+)\]", text_of(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return match.group(1) if match else None


def compiler(extension: Path = Path(_engine.__file__)) -> str | None:
    """Return the compilers that the extension's comment section names, if its format has such a section."""
    data = extension.read_bytes()
    found = re.findall(rb"(?:GCC: \([^()\0]*\)|clang version) [0-9][0-9.]*", data)
    return ", ".join(sorted({f.decode("ascii", "replace") for f in found})) or None


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the git commit of the tree with this folder, with "+" if tracked files differ from it."""
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout) if head.returncode == 0 else None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "family": ops.processor_family(),
        "cores": os.cpu_count(),
        "usable_cores": ops.default_threads(),
        "caches": cache_bytes(),
        "memory": memory_bytes(),
        "huge_pages": huge_pages(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_at_start": psutil and psutil.getloadavg()[0],
    }


def instruction_set() -> str:
    """Return the instruction set that the engine uses now."""
    return next(b.name for b in ops.backends() if b.chosen)


def software() -> dict[str, Any]:
    return {
        "afflux": __version__,
        "commit": commit(),
        "instruction_set": instruction_set(),
        "policy": ops.policy(),
        "compiler": compiler(),
        "python": sys.version.split()[0],
        "numpy": version("numpy"),
        "torch": version("torch"),
    }
