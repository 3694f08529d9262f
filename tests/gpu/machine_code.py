"""What the compiled kernels do with registers and memory, by device: python tests/machine_code.py FILE...

Reads a library or an extension with CUDA's cuobjdump. Fails if a kernel keeps anything in local memory, or reaches
a vector by an address of which the code does not know that it is the device's.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

CUOBJDUMP = shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))


@dataclass
class Device:
    """The code for one compute capability."""

    name: str
    kernels: int = 0
    registers: int = 0  #: of the kernel that takes most
    local: int = 0  #: bytes of local memory and stack a thread, of all kernels
    wide_loads: int = 0  #: instructions that move 16 bytes
    wide_stores: int = 0
    generic: int = 0  #: that look first which memory is meant


def lines(*arguments):
    with subprocess.Popen([CUOBJDUMP, *map(str, arguments)], stdout=subprocess.PIPE, text=True) as process:
        yield from process.stdout
    assert process.returncode == 0, arguments


def read(path):
    """Its devices, in the order of their capabilities."""
    devices, current = {}, None
    for line in lines("-res-usage", path):
        if found := re.match(r"arch = (sm_\d+)", line):
            current = devices.setdefault(found[1], Device(found[1]))
        elif found := re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            registers, *local = map(int, found.groups())
            current.kernels += 1
            current.registers = max(current.registers, registers)
            current.local += sum(local)
    counts = defaultdict(Counter)
    for line in lines("-sass", path):
        if found := re.match(r"\s*arch = (sm_\d+)", line):
            current = counts[found[1]]
        elif found := re.search(r"\s((?:LD|ST)[GL]?)\.E(?:\.[A-Z0-9]+)*", line):
            current[found[1]] += 1
            current[found[1], "128"] += ".128" in found[0]
    for name, count in counts.items():
        device = devices[name]
        device.wide_loads, device.wide_stores = count["LDG", "128"], count["STG", "128"]
        device.generic = count["LD"] + count["ST"]
    return sorted((d for d in devices.values() if d.kernels), key=lambda d: int(d.name.removeprefix("sm_")))


def main(paths):
    failed = False
    for path in paths:
        print(
            f"{path}\n{'device':8}{'kernels':>8}{'registers':>10}{'local':>7}{'LDG.128':>9}{'STG.128':>9}{'generic':>9}"
        )
        for d in read(path):
            print(f"{d.name:8}{d.kernels:8}{d.registers:10}{d.local:7}{d.wide_loads:9}{d.wide_stores:9}{d.generic:9}")
            failed |= bool(d.local or d.generic)
    return int(failed)


if __name__ == "__main__":
    sys.exit("cuobjdump is not installed" if CUOBJDUMP is None else main(sys.argv[1:]))
