"""The common part of the adapters' rows: the columns of from-models, without those of traffic."""

from dataclasses import replace

from bench.rows.peers.models import MODELS
from bench.spec.columns import BY_D, ERROR, ROLE, TIMES_OURS, ULP, UPDATE
from bench.spec.contender import Contender
from bench.spec.row import Row


def adapter_row(framework: str, path: str, contenders: list[Contender], modules: tuple[str, ...]) -> Row:
    """Return the row of a framework.

    Args:
        framework: its name.
        path: the first and the last step that the contenders make.
        contenders: those of the row.
        modules: the framework's modules, of the contenders that name none.
    """
    return replace(
        MODELS,
        name=f"{framework}-adapter",
        formula=f"params + 1/M sum_i (y_i - params); {path}",
        contenders=[replace(each, modules=each.modules or modules) for each in contenders],
        columns=(BY_D, ROLE, *UPDATE, TIMES_OURS, ERROR, ULP),
    )
