"""The replies of APPFL's clients: a dict of arrays, and a dict of the trainer's report. Both are untrusted."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from afflux.integrations._reading import finite_number
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_int, plain_id, zero_dim
from afflux.rules.rule import ClientId


class Last(NamedTuple):
    """Facts about a client's last model."""

    #: Two models have different marks, unless a few of their elements and their reports agree. None: no model, or a
    #: report without a round, which cannot distinguish two trainings with the same result.
    mark: int | None
    round: int  #: number of the client's trainings, as APPFL's trainers count them; 1 if they do not


def id_of(client_id: object) -> ClientId | None:
    """Return the client's id for the server; None if it is no valid id."""
    with suppress(AffluxError):
        return plain_id(client_id)
    return None


def last_of(model: Any, report: Mapping[str, Any]) -> Last:
    """Return the facts to keep about a client's model."""
    number = as_int(report.get("round", 1))
    return Last(_mark_of(model, report) if "round" in report and number is not None else None, number or 0)


def _mark_of(model: Any, report: Mapping[str, Any]) -> int | None:
    with suppress(Exception):  # this may be no model
        arrays = [*model.values()]
        flat = [array.reshape(-1) for array in (arrays[0], arrays[len(arrays) // 2], arrays[-1])]
        some = [tuple(each[:: max(1, len(each) // 8)].tolist()) for each in flat]
        said = [(name, value) for name, value in report.items() if isinstance(value, int | float | str)]
        return hash((*some, *said))
    return None


def number_of(value: object) -> float | None:
    """Return a finite number, or the last one of a list (trainers report one per epoch); None for anything else."""
    return finite_number(zero_dim(value[-1] if isinstance(value, list | tuple) and value else value))
