"""The common part of the adapters' rows: the columns of from-models, without those of traffic."""

from dataclasses import replace

from bench.rows.peers.models import MODELS
from bench.spec.columns import BY_D, ERROR, ROLE, TIMES_OURS, ULP, UPDATE
from bench.spec.contender import Contender
from bench.spec.row import Row


def adapter_row(framework: str, path: str, contenders: list[Contender]) -> Row:
    """Return the row of a framework; `path` describes the first and the last step that its contenders make."""
    return replace(
        MODELS,
        name=f"{framework}-adapter",
        formula=f"params + 1/M sum_i (y_i - params); {path}",
        contenders=contenders,
        columns=(BY_D, ROLE, *UPDATE, TIMES_OURS, ERROR, ULP),
    )
