"""The limit of a row: the highest bandwidth that anything which moves comparable traffic reached in the same run."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from afflux.bench.measure.timing import Timed
from afflux.bench.spec.row import Row
from afflux.bench.spec.streams import Traffic, kind


@dataclass(frozen=True)
class Limit:
    gbps: float
    by: Timed  #: the probe or contender that reached it


def mix(traffic: Traffic) -> set[object]:
    """The streams of the sweeps, however often each is made."""
    return {replace(streams, times=1) for streams in traffic}


def comparable(probe: Timed, traffic: Traffic) -> bool:
    """Whether the probe only reads, or reads and writes just as this operation does.

    A probe of another mix moves other traffic: a probe in place avoids the hidden read of memory that is written.
    """
    return kind(probe.traffic) == "read" or mix(probe.traffic) == mix(traffic)


def of_row(row: Row, m: int, probes: Iterable[Timed], contenders: Iterable[Timed]) -> Limit:
    """The highest bandwidth of the comparable probes and of this row's contenders."""
    traffic = row.traffic(m)
    able = [probe for probe in probes if comparable(probe, traffic)]
    able += [contender for contender in contenders if contender.row == row.name]
    best = max(able, key=lambda timed: timed.gbps)
    return Limit(best.gbps, best)


def on_gpu(row: Row, m: int, probes: Iterable[Timed], contenders: Iterable[Timed]) -> Limit:
    """The highest bandwidth of all probes and of afflux: where a write reads nothing, every mix is comparable."""
    able = [*probes, *(c for c in contenders if c.row == row.name and c.by and c.by.role == "ours")]
    best = max(able, key=lambda timed: timed.gbps)
    return Limit(best.gbps, best)


def of_kinds(probes: Iterable[Timed]) -> dict[str, float]:
    """The machine's best of each kind of traffic."""
    best: dict[str, float] = {}
    for probe in probes:
        sort = kind(probe.traffic)
        best[sort] = max(best.get(sort, 0), probe.gbps)
    return best
