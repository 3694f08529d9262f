"""The replies of APPFL's clients: a dict of arrays, and a dict of the trainer's report. Both are untrusted."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from afflux.integrations._appfl_config import Aggregation
from afflux.integrations._core import Trained
from afflux.integrations._reading import finite_number, fraction_of
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_int, plain_id, zero_dim
from afflux.rules.rule import ClientId

#: The name of a client's weight among its metrics.
WEIGHT = ""


class Last(NamedTuple):
    """Facts about a client's last model."""

    #: Two models have different marks, unless a few of their elements and their reports agree. None: no model, or a
    #: report without a round, which cannot distinguish two trainings with the same result.
    mark: int | None
    round: int  #: number of the client's trainings, as APPFL's trainers count them; 1 if they do not


def id_of(client_id: object) -> ClientId | None:
    """Return the client's id for the server; None if it is no valid id."""
    try:
        return plain_id(client_id)
    except AffluxError:
        return None


def last_of(model: Any, report: Mapping[str, Any]) -> Last:
    """Return the facts to keep about a client's model."""
    number = as_int(report.get("round", 1))
    return Last(_mark_of(model, report) if "round" in report and number is not None else None, number or 0)


def _mark_of(model: Any, report: Mapping[str, Any]) -> int | None:
    try:
        arrays = [*model.values()]
        flat = [array.reshape(-1) for array in (arrays[0], arrays[len(arrays) // 2], arrays[-1])]
        some = [tuple(each[:: max(1, len(each) // 8)].tolist()) for each in flat]
        said = [(name, value) for name, value in report.items() if isinstance(value, int | float | str)]
        return hash((*some, *said))
    except Exception:  # this is no model
        return None


def trained_of(
    model: Any, report: Mapping[str, Any], size: Any, chosen: Aggregation, unsaved: Collection[str]
) -> Trained:
    """Return a client's model, with the known facts about it.

    Args:
        model: arrays by name.
        report: the report of the trainer.
        size: the client's number of examples; None: unknown.
        chosen: the configuration, which determines the facts that count.
        unsaved: names of arrays that the server's model does not have.

    Raises:
        ValueError: the model is not a dict.
    """
    if not isinstance(model, Mapping):
        raise ValueError(f"the model is a {type(model).__name__}, must be a dict of arrays")
    arrays = {name: array for name, array in model.items() if name not in unsaved} if unsaved else model
    if chosen.equal_weights:  # but clients without examples have not trained
        count = 1 if size is None or fraction_of(size) is not None else as_int(size)
        size = size if count is None else min(count, 1)
    found = {name: number for name in chosen.metrics if (number := number_of(report.get(name))) is not None}
    steps = as_int(report.get("current_local_steps"))
    return Trained(
        arrays,
        size,
        number_of(report.get(chosen.loss_key)),
        local_steps=None if steps is None or steps < 1 else steps,
        metrics={WEIGHT: fraction_of(size) or as_int(size) or 1, **found},
        facts={name: number_of(report.get(name)) for name in chosen.fact_names},
    )


def number_of(value: object) -> float | None:
    """Return a finite number, or the last one of a list (trainers report one per epoch); None for anything else."""
    return finite_number(zero_dim(value[-1] if isinstance(value, list | tuple) and value else value))
