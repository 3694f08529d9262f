"""The run folder: config.json, metrics.csv, staleness.csv, summary.csv and .json, curves.png; audit/ beside them."""

import csv
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from afflux import __version__
from afflux.ops.units import in_bytes
from afflux.sim.audit import FOLDER, plain
from afflux.sim.config import SimConfig
from afflux.sim.errors import ConfigError, require
from afflux.sim.kept import Keep
from afflux.sim.result import Row, RunResult, by_rule, summarise

TELL_ABOVE = 1e9  #: bytes of kept updates


def new_folder(out: Path | None) -> Path:
    """Make the run folder: `out`, or runs/<date and time>; an existing folder must be empty."""
    folder = out or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder


def audit_folder(
    folder: Path,
    config: SimConfig,
    runs: int,
    updates: bool = False,
    say: Callable[[str], None] = print,
) -> Keep:
    """Make the folder of the audit logs; says how much the kept updates will take if it is more than a gigabyte."""
    if updates:
        from afflux.sim.world import num_parameters

        size = 4 * num_parameters(config) * config.arrivals * runs
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ConfigError(f"the updates take {in_bytes(size)}, but {folder} has {in_bytes(free)} free")
        if size > TELL_ABOVE:
            say(f"the updates will take {in_bytes(size)} in {folder}/{FOLDER}")
    (folder / FOLDER).mkdir()
    return Keep(folder / FOLDER, updates)


def tidied(folder: Path) -> bool:
    """Remove logs in which nothing has arrived, and empty folders; return whether anything is left."""
    for log in (folder / FOLDER).glob("*.jsonl"):
        with log.open("rb") as file:
            nothing = len(list(islice(file, 2))) < 2
        if nothing:
            log.unlink()
            log.with_suffix(".updates.npy").unlink(missing_ok=True)
    for empty in (folder / FOLDER, folder):
        # Something in it is what is left; an empty folder would stand in the way of the next try.
        with suppress(OSError):
            empty.rmdir()
    return folder.exists()


def write(folder: Path, results: Sequence[RunResult], config: SimConfig) -> None:
    """Write all files of a comparison into `folder`."""
    require("matplotlib")
    from afflux.sim.picture import draw

    _json(folder / "config.json", _configuration(results, config))
    _csv(folder / "metrics.csv", ("rule", "seed", *Row._fields), _metrics(results))
    _csv(folder / "staleness.csv", ("rule", "seed", "staleness", "arrivals"), _staleness(results))
    table = summarise(results, config.target)
    names = list(next(iter(table.values())))
    _csv(
        folder / "summary.csv",
        ("rule", "seeds", *(f"{name}{part}" for name in names for part in ("", "_std"))),
        (
            (label, len(runs), *(x for name in names for x in table[label][name][:2]))
            for label, runs in by_rule(results).items()
        ),
    )
    _json(
        folder / "summary.json",
        {
            "mean_and_std_over_seeds": {
                label: {name: value._asdict() for name, value in row.items()} for label, row in table.items()
            },
            "runs": [
                {
                    "rule": run.spec.label,
                    "seed": run.seed,
                    "clients_with_data": run.num_clients,
                    **run.summary(config.target),
                    "params_sha256": run.digest,
                }
                for run in results
            ],
        },
    )
    draw(results, headline(config, results), config.target, folder / "curves.png")


def headline(config: SimConfig, results: Sequence[RunResult]) -> str:
    """Describe the setting in one line."""
    partition = config.partition
    if partition == "dirichlet":
        partition = f"Dirichlet({config.alpha:g})"
    seeds = len({run.seed for run in results})
    leaders = {run.leader for run in results} - {""}
    paired = f", all on the updates of {', '.join(sorted(leaders))}" if leaders else ""
    return (
        f"{config.data}, {config.model}, {config.num_clients} clients ({partition}), "
        f"{config.concurrency} at once, delays {config.delays}, "
        f"{config.arrivals} arrivals, {seeds} seed{'s' if seeds > 1 else ''}{paired}"
    )


def _configuration(results: Sequence[RunResult], config: SimConfig) -> dict[str, Any]:
    return {
        "simulation": asdict(config),
        "rules": [
            {
                "label": label,
                "name": runs[0].spec.name,
                "options": runs[0].spec.plain_options(),
                "updates_of": runs[0].leader or label,
            }
            for label, runs in by_rule(results).items()
        ],
        "seeds": sorted({run.seed for run in results}),
        "versions": {
            "afflux": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "torch")},
        },
        "machine": platform.machine(),
    }


def _metrics(results: Sequence[RunResult]) -> Iterable[tuple[Any, ...]]:
    return ((run.spec.label, run.seed, *row) for run in results for row in run.rows)


def _staleness(results: Sequence[RunResult]) -> Iterable[tuple[Any, ...]]:
    for run in results:
        values, counts = np.unique(run.staleness, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            yield run.spec.label, run.seed, value, count


def _csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _json(path: Path, content: dict[str, Any]) -> None:
    # JSON has no nan: a target that was not reached is null.
    path.write_text(json.dumps(plain(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
