"""The runs of several machines side by side, as Markdown: one JSON file of results each."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from bench.output.report import FORMAT
from bench.output.tables import processor, size
from bench.spec.columns import Line

#: The operations in the table, in this order.
SHOWN = (
    *("ingest", "gram", "fedbuff", "fedbuff-bf16", "ca2fl", "fadas", "wkafl"),
    *("mf-ca2fl-affine-8", "mf-ca2fl-affine-4", "mf-ca2fl-rotated-2", "mf-ca2fl-float16"),
)
#: afflux's figures, as in the table, by operation, d and M.
Cells = dict[tuple[str, int, int], str]


def markdown(folder: Path) -> str:
    """Return two tables of all results in a folder: the machines, and each operation's share of its limit.

    Raises:
        ValueError: there are no results, or a file is none of this version's.
    """
    runs = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    if not runs:
        raise ValueError(f"{folder} has no results: python -m bench --json {folder / 'NAME.json'} writes some")
    keys = sorted({key for _, cells in runs.values() for key in cells}, key=lambda key: (SHOWN.index(key[0]), *key[1:]))
    head = ["operation", "d", "M", *(f"{name}: GB/s, % of limit, x best torch" for name in runs)]
    rows = [[key[0], f"{key[1]:_d}", str(key[2]), *(cells.get(key, "") for _, cells in runs.values())] for key in keys]
    heads = ["", "processor", "cores", "caches", "best read GB/s", "instruction set", "policy", "commit", "samples"]
    return _table(heads, [[name, *about] for name, (about, _) in runs.items()]) + "\n" + _table(head, rows)


def _read(path: Path) -> tuple[list[str], Cells]:
    """Return the description of the machine, and the figures."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["format"] == FORMAT:
            return _about(run), _cells(run)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} holds no results of format {FORMAT}: python -m bench --json writes them")


def _cells(run: dict[str, Any]) -> Cells:
    """Return the figures by operation, d and M.

    Of several cases with the same operation, d and M, such as other numbers of threads, the first one counts.
    """
    cells: Cells = {}
    for case in run["cases"]:
        for line in chain.from_iterable(case["rows"].values()):
            if line["first"] and line["operation"] in SHOWN:
                cells.setdefault((line["operation"], line["d"], line["m"]), _cell(line))
    return cells


def _about(run: dict[str, Any]) -> list[str]:
    box, soft = run["machine"], run["software"]
    best = max((case["best"].get("read", 0.0) for case in run["cases"]), default=0.0)
    return [
        processor(box),
        f"{box['usable_cores']} of {box['cores']}",
        ", ".join(f"{cache} {size(amount)}" for cache, amount in box["caches"].items()),
        f"{best:.1f}",
        soft["instruction_set"],
        soft.get("policy") or "none yet",
        (soft["commit"] or "?")[:12],
        str(run["settings"]["repeats"]),
    ]


def _cell(line: Line) -> str:
    best = line.get("times_best")
    return f"{line['gbps']:.1f}, {line['percent_of_limit']:.0f} %" + (f", {best:.2f}" if best else "")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
