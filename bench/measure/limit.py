"""The limit of a row: the highest bandwidth of all probes and contenders with comparable traffic in the same run."""

from collections.abc import Iterable
from dataclasses import replace

from bench.measure.timing import Timed
from bench.spec.inputs import Case
from bench.spec.row import Row
from bench.spec.streams import Traffic, kind


def mix(traffic: Traffic) -> set[object]:
    """Return the streams of the sweeps, without the number of times that each sweep runs."""
    return {replace(streams, times=1) for streams in traffic}


def comparable(probe: Timed, traffic: Traffic) -> bool:
    """Return whether the probe only reads, or reads and writes as this operation does.

    The speeds of other mixes differ: for example, a probe in place avoids the hidden read of memory that is written.
    """
    return kind(probe.traffic) == "read" or mix(probe.traffic) == mix(traffic)


def of_row(row: Row, case: Case, probes: Iterable[Timed], contenders: Iterable[Timed]) -> Timed:
    """Return the one with the highest bandwidth of the comparable probes and of this row's contenders.

    On a GPU a write reads nothing, so all mixes are comparable; of the contenders, only afflux counts there.
    """
    host, traffic = case.device == "cpu", row.traffic(case.m)
    able = [probe for probe in probes if not host or comparable(probe, traffic)]
    able += [c for c in contenders if c.row == row.name and (host or (c.by and c.by.role == "ours"))]
    return max(able, key=lambda timed: timed.gbps)


def of_kinds(probes: Iterable[Timed]) -> dict[str, float]:
    """Return the highest bandwidth of the probes of each kind of traffic."""
    return {kind(probe.traffic): probe.gbps for probe in sorted(probes, key=lambda probe: probe.gbps)}
