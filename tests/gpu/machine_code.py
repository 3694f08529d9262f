"""What the compiled kernels do with registers and memory, by device: python tests/gpu/machine_code.py FILE...

Reads a library or an extension with CUDA's cuobjdump. Fails if a kernel keeps anything in local memory, reaches a
vector by an address of which the code does not know that it is the device's, or needs more than was reached (REACHED).
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

CUOBJDUMP = shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))
#: Registers of a multiprocessor. A warp's are allocated 8 for each thread at a time.
REGISTERS, UNIT = 65536, 8


class Reached(NamedTuple):
    """What a kernel reached with nvcc 13.0."""

    threads: int  #: of a block
    registers: tuple[int, int, int]  #: at most: on capability 8.x, on 9.0, and from 10.0 on
    loads: int = 0  #: reads of vectors in the main loop, each of `width` bytes
    width: int = 0
    stores: int = 0  #: and as wide stores
    arrival: tuple[int, ...] = ()  #: or, instead of reads and stores: instructions of each loop over arrivals
    common: tuple[int, ...] = ()  #: and of the shorter half of these loops, which serves common rounds


#: By a part of the mangled name: the types of params and updates, the kind of steps, and whether there is a rule
#: vector; or the type and the number of vectors, and whether there is an e. The loop of a sum reads 8 vectors once,
#: that of `inner` a row of them and memory; that of `ingest` copies 8 rows; that of ChaCha20 reads none. A round with
#: encoded rows has a loop over arrivals for each number of bits; a factor of the rows takes a product for each element.
REACHED = {
    "SumBodyIffLNS0_5StepsE0ELb0E": Reached(256, (64, 64, 103), 8, 16),
    "SumBodyIffLNS0_5StepsE1ELb0E": Reached(256, (73, 74, 112), 8, 16),
    "SumBodyIffLNS0_5StepsE2ELb0E": Reached(256, (80, 80, 126), 8, 16),
    "SumBodyIffLNS0_5StepsE0ELb1E": Reached(256, (84, 80, 124), 8, 16),
    "SumBodyIfNS_8Bfloat16ELNS0_5StepsE0ELb0E": Reached(256, (65, 68, 98), 8, 8),
    "SumBodyIfNS_8Bfloat16ELNS0_5StepsE2ELb0E": Reached(256, (78, 77, 124), 8, 8),
    "SumBodyIddLNS0_5StepsE0ELb0E": Reached(256, (60, 60, 66), 8, 16),
    "SumBodyIddLNS0_5StepsE2ELb0E": Reached(256, (80, 80, 91), 8, 16),
    "InnerLanesBodyIfLi10ELb1E": Reached(64, (96, 108, 128), 11, 4),
    "InnerLanesBodyIfLi16ELb1E": Reached(64, (164, 167, 165), 17, 4),
    "IngestBodyIfvLb1E": Reached(256, (73, 64, 66), 8, 16, 8),
    "NoisyBodyINS0_9ApplyBodyIff": Reached(256, (106, 116, 107)),
    "NoisyBodyINS0_11TrimmedBodyIff": Reached(128, (126, 131, 120)),
    "EncodedBodyIffNS0_6AffineE": Reached(256, (80, 80, 80), arrival=(311, 310, 596), common=(192, 193, 315)),
    "EncodedBodyIffNS0_6HalvesINS_7Float16E": Reached(
        256, (74, 76, 78), arrival=(274, 271, 405), common=(168, 170, 288)
    ),
    "EncodedBodyIffNS0_6HalvesINS_8Bfloat16E": Reached(
        256, (74, 76, 78), arrival=(194, 191, 325), common=(89, 89, 197)
    ),
    "EncodedBodyIffNS0_7RotatedE": Reached(256, (80, 80, 80), arrival=(847, 850, 1402)),
}


@dataclass
class Kernel:
    name: str
    registers: int
    code: list[tuple[int, str]] = field(default_factory=list)  #: addresses and instructions

    @property
    def loops(self):
        """The instructions of each loop, by their addresses."""
        for address, instruction in self.code:
            jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
            if jump and (begin := int(jump[1], 16)) < address:
                yield {at: each for at, each in self.code if begin <= at <= address}

    @property
    def accesses(self):
        """For each loop, how many reads and stores of global memory it has, by their bytes."""
        for loop in self.loops:
            yield tuple(Counter(width(each) for each in loop.values() if kind in each) for kind in ("LDG.", "STG."))

    def arrivals(self, reached):
        """Instructions of the longest loop over arrivals, one that stores and has no such loop within, beside what was
        reached, and the same for common rounds if they have loops of their own."""
        storing = [loop for loop in self.loops if any("STG." in each for each in loop.values())]
        lengths = sorted(len(a) for a in storing if not any(b.keys() < a.keys() for b in storing))
        kinds = ((lengths, reached.arrival), (lengths[: len(lengths) // 2], reached.common))
        return [(max(loops, default=0), most) for loops, most in kinds if most]

    def misses(self, reached, capability):
        """What the kernel needs beyond what was reached."""
        generation = (capability >= 90) + (capability >= 100)
        if self.registers > (most := reached.registers[generation]):
            yield f"{self.registers} registers, were {most}"
        for arrival, most in self.arrivals(reached):
            if not 0 < arrival <= most[generation]:
                yield f"{arrival} instructions for an arrival, were {most[generation]}"
        accesses = tuple(+Counter({reached.width: count}) for count in (reached.loads, reached.stores))
        if not reached.arrival and accesses not in self.accesses:
            yield f"no loop with just {reached.loads} reads and {reached.stores} stores of {reached.width} bytes"

    def blocks(self, threads):
        """The blocks of threads that a multiprocessor has registers for."""
        return REGISTERS // (-(-self.registers // UNIT) * UNIT * threads)


def width(access):
    found = re.search(r"(?:LDG|STG)\S*\.(128|64|U16|S16|U8|S8)\b", access)
    return int(found[1].lstrip("US")) // 8 if found else 4


@dataclass
class Device:
    """The code for one compute capability."""

    name: str
    kernels: list[Kernel] = field(default_factory=list)
    local: int = 0  #: bytes of local memory and stack a thread, of all kernels
    wide_loads: int = 0  #: instructions that move 16 bytes
    wide_stores: int = 0
    generic: int = 0  #: that look first which memory is meant

    @property
    def capability(self):
        return int(self.name.removeprefix("sm_"))

    @property
    def registers(self):
        """Those of the kernel that takes most."""
        return max(kernel.registers for kernel in self.kernels)

    @property
    def reached(self):
        """The kernels of REACHED that this code has."""
        for part, reached in REACHED.items():
            yield from ((kernel, reached) for kernel in self.kernels if part in kernel.name)

    @property
    def misses(self):
        found = ((kernel, kernel.misses(reached, self.capability)) for kernel, reached in self.reached)
        return [f"{kernel.name}: {miss}" for kernel, misses in found for miss in misses]


def lines(*arguments):
    with subprocess.Popen([CUOBJDUMP, *map(str, arguments)], stdout=subprocess.PIPE, text=True) as process:
        yield from process.stdout
    assert process.returncode == 0, arguments


def read(path):
    """Its devices, in the order of their capabilities."""
    devices, current, name = {}, None, ""
    for line in lines("-res-usage", path):
        if found := re.match(r"arch = (sm_\d+)", line):
            current = devices.setdefault(found[1], Device(found[1]))
        elif found := re.match(r"\s*Function (\S+):", line):
            name = found[1]
        elif found := re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            registers, *local = map(int, found.groups())
            current.kernels.append(Kernel(name, registers))
            current.local += sum(local)
    code = []
    for line in lines("-sass", path):
        if found := re.match(r"\s*arch = (sm_\d+)", line):
            current = devices[found[1]]
        elif found := re.match(r"\s*Function : (\S+)", line):
            code = next((kernel.code for kernel in current.kernels if kernel.name == found[1]), [])
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", line):
            code.append((int(found[1], 16), found[2]))
            if found := re.search(r"\b((?:LD|ST)[GL]?)\.E(?:\.[A-Z0-9]+)*", found[2]):
                current.wide_loads += found[1] == "LDG" and ".128" in found[0]
                current.wide_stores += found[1] == "STG" and ".128" in found[0]
                current.generic += found[1] in ("LD", "ST")
    return sorted((d for d in devices.values() if d.kernels), key=lambda d: d.capability)


def main(paths):
    failed = False
    for path in paths:
        devices = read(path)
        print(
            f"{path}\n{'device':8}{'kernels':>8}{'registers':>10}{'local':>7}{'LDG.128':>9}{'STG.128':>9}{'generic':>9}"
        )
        for d in devices:
            row = (len(d.kernels), 8), (d.registers, 10), (d.local, 7), (d.wide_loads, 9), (d.wide_stores, 9)
            print(d.name.ljust(8), *(f"{number:{places}}" for number, places in (*row, (d.generic, 9))), sep="")
            failed |= bool(d.local or d.generic or d.misses)
        for d in devices:
            for kernel, reached in d.reached:
                blocks = kernel.blocks(reached.threads)
                loop = "".join(f", {arrival} instructions for an arrival" for arrival, _ in kernel.arrivals(reached))
                print(f"{d.name}: {kernel.name}: {kernel.registers} registers, {blocks} blocks a multiprocessor{loop}")
            print(*d.misses, sep="\n", end="\n" if d.misses else "")
    return int(failed)


if __name__ == "__main__":
    sys.exit("cuobjdump is not installed" if CUOBJDUMP is None else main(sys.argv[1:]))
