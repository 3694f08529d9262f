"""The results of a run as data for JSON: the figures of all contenders, the limits, and who is faster than afflux."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from statistics import quantiles
from typing import Any

from bench.measure import limit, machine
from bench.measure.timing import Timed
from bench.spec.columns import Line
from bench.spec.inputs import Case
from bench.spec.row import Row
from bench.spec.streams import kind, spoken

FORMAT = 4
LEVEL = 0.99  #: contenders that take less than this share of afflux's time are listed as faster


def summary(seconds: list[float]) -> dict[str, float]:
    lower, median, upper = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {
        "median": median,
        "min": min(seconds),
        "lower_quartile": lower,
        "upper_quartile": upper,
        "max": max(seconds),
        "samples": len(seconds),
    }


def figures(timed: Timed) -> Line:
    facts = {key: getattr(timed, key) for key in ("name", "what", "bytes", "gbps", "laps", "seconds")}
    return facts | summary(timed.seconds)


def of_probe(probe: Timed) -> Line:
    """Return the figures of a probe: `what` are its streams, `how` is its variant."""
    return figures(probe) | {"how": probe.what, "what": spoken(probe.traffic), "kind": kind(probe.traffic)}


def fastest(own: Iterable[Timed], role: str) -> Timed | None:
    """Return the fastest contender of this role that computes the whole operation."""
    able = [t for t in own if t.by and t.by.role == role and t.by.traffic is None]
    return min(able, key=lambda t: t.median, default=None)


def lines(case: Case, row: Row, own: list[Timed], most: Timed) -> list[Line]:
    """Return the figures of a row's contenders; only those that compute the whole operation are compared by time."""
    ours, isa = own[0], machine.instruction_set() if case.device == "cpu" else case.device
    others = {role: fastest(own, role) for role in ("plain", "best", "peer")}
    found = []
    for timed in own:
        contender = timed.by
        assert contender is not None
        whole = contender.traffic is None
        found.append(
            {"operation": row.name}
            | asdict(case)
            | {"dtype": row.dtype, "isa": isa if contender.role == "ours" else None}
            | figures(timed)
            | {
                "role": contender.role,
                "caveat": contender.caveat,
                "first": timed is ours,
                "part": not whole,
                "limit": most.gbps,
                "percent_of_limit": 100 * timed.gbps / most.gbps,
                "kernels": timed.kernels,
                "alone": timed.alone,
                "percent_alone": timed.bytes / timed.alone / 1e7 / most.gbps if timed.alone else None,
                "times_ours": timed.median / ours.median if whole else None,
                "compile_seconds": timed.first - timed.median if contender.compiles else None,
                "us": 1e6 * timed.median / case.m,
                "errors": timed.errors,
                "error": timed.errors.get(row.output),
            }
            | {f"times_{role}": t.median / timed.median if t and whole else None for role, t in others.items()}
        )
    return found


def of_case(case: Case, rows: list[Row], probes: list[Timed], contenders: list[Timed]) -> dict[str, Any]:
    """Return the results of one case: the fastest probe of each kind of traffic, and each row with its limit."""
    limits = {row.name: limit.of_row(row, case, probes, contenders) for row in rows}
    of_rows = {row.name: [timed for timed in contenders if timed.row == row.name] for row in rows}
    return {
        "name": str(case),
        **asdict(case),
        "best": limit.of_kinds(probes),
        "probes": [of_probe(probe) for probe in probes],
        "limits": {name: {"gbps": most.gbps, "by": most.name, "how": most.what} for name, most in limits.items()},
        "rows": {row.name: lines(case, row, of_rows[row.name], limits[row.name]) for row in rows},
    }


def lines_of(row: Row, cases: list[dict[str, Any]]) -> list[Line]:
    """Return all lines of a row, case by case."""
    found = [line for case in cases for line in case["rows"].get(row.name, [])]
    return sorted(found, key=lambda line: line[row.along]) if row.along else found


def losses(row: Row, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the contenders that compute the whole operation faster than afflux, with the sizes and the ratios."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines_of(row, cases):
        if line["role"] == "ours" or line["part"] or line["times_ours"] > LEVEL:
            continue
        who = found.setdefault(
            line["name"], {"row": row.name, "name": line["name"], "caveat": line["caveat"], "at": [], "times": []}
        )
        who["at"].append({key: line[key] for key in ("d", "m", "clients")})
        who["times"].append(1 / line["times_ours"])
    return list(found.values())


def results(
    box: dict[str, Any], rows: list[Row], cases: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return all results of a run."""
    for row in rows:
        row.compare(lines_of(row, cases))
    return {
        "format": FORMAT,
        "machine": box,
        "software": machine.software(),
        "settings": settings,
        "rows": [{key: getattr(row, key) for key in ("name", "formula", "counted", "dtype")} for row in rows],
        "cases": cases,
        "where_we_lose": [loss for row in rows for loss in losses(row, cases)],
    }


# Short JSON text that is easy to compare: summaries instead of samples, one line for each contender


def without_samples(value: Any) -> Any:
    """Return the results without the seconds of every sample; a summary of them stays."""
    if isinstance(value, dict):
        return {key: without_samples(part) for key, part in value.items() if key != "seconds"}
    return [without_samples(part) for part in value] if isinstance(value, list) else value


def to_json(value: Any) -> str:
    """Return JSON with one line for each object that holds no list, such as all figures of one contender."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    parts: list[tuple[str, Any]]
    if not _holds_a_list(value):
        yield json.dumps(value)
        return
    if isinstance(value, dict):
        (begin, end), parts = "{}", [(f"{json.dumps(key)}: ", part) for key, part in value.items()]
    else:
        (begin, end), parts = "[]", [("", part) for part in value]
    yield begin
    for number, (key, part) in enumerate(parts, 1):
        first, *rest = _lines(part)
        *rest, last = (f" {key}{first}", *(f" {line}" for line in rest))
        yield from rest
        yield last + "," * (number < len(parts))
    yield end


def _holds_a_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and any(map(_holds_a_list, value.values())))
