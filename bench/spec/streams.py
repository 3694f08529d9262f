"""The memory streams of an operation, which determine its bytes and the probes of its limit."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Streams:
    """The vectors of one sweep over d elements: the bytes per element of each, in 64ths."""

    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()  #: written to other memory than the vectors that are read
    in_place: tuple[float, ...] = ()  #: read and written back
    times: int = 1  #: the number of sets of vectors, stored one after the other, over which the sweep is made

    def bytes(self, d: int) -> int:
        """Return the bytes of the sweep: each input once, each output once."""
        return ceil(d * self.times * (sum(self.reads) + sum(self.writes) + 2 * sum(self.in_place)))

    def written(self) -> float:
        """Return the bytes per element that are written. Written memory must not be an input of any contender."""
        return self.times * (sum(self.writes) + sum(self.in_place))

    def __str__(self) -> str:
        parts = ((self.reads, "read"), (self.writes, "written"), (self.in_place, "in place"))
        said = ", ".join(f"{amounts(sizes)} {how}" for sizes, how in parts if sizes)
        return said if self.times == 1 else f"{self.times} x ({said})"


#: the sweeps of an operation, one after the other
Traffic = tuple[Streams, ...]


def moved(traffic: Traffic, d: int) -> int:
    return sum(streams.bytes(d) for streams in traffic)


def kind(traffic: Traffic) -> str:
    """Return the kind of memory traffic: read, read and write, in place, or all of these (mixed)."""
    in_place = any(streams.in_place for streams in traffic)
    elsewhere = any(streams.writes for streams in traffic)
    if in_place:
        return "mixed" if elsewhere or any(streams.reads for streams in traffic) else "in place"
    return "read and write" if elsewhere else "read"


def spoken(traffic: Traffic) -> str:
    return "; ".join(map(str, traffic))


def amounts(sizes: tuple[float, ...]) -> str:
    """Format the numbers of streams as "11", or "10 of 2 bytes + 1" if not all have elements of 4 bytes."""
    kinds = dict.fromkeys(sizes)
    return " + ".join(f"{sizes.count(size)}" + (f" of {size:g} bytes" if size != 4 else "") for size in kinds)
