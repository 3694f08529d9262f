"""`afflux reproduce` and `afflux codecs`: tables, as Markdown, JSON and figures."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afflux.cli.common import OutFolder, Processes, parse_seeds, report_errors
from afflux.sim.errors import EXTRA, require

if TYPE_CHECKING:
    from afflux.sim.papers.publishing import Measure, Page
    from afflux.sim.papers.tables import Table

AFL_HELP = """Anarchic FL, Table 2: logistic regression on MNIST, our accuracy beside the paper's.

\b
Examples:
  afflux reproduce afl-table2 --seeds 0,1,2
  afflux reproduce afl-table2 --workers 20/100 --data-dir ~/data
"""
RULES_HELP = """Every preset under FADAS's mild and large delays: a table and a figure.

\b
Examples:
  afflux reproduce rules
  afflux reproduce rules --data mnist --seeds 0
"""
MF_CA2FL_HELP = """MF-CA2FL with every codec beside CA2FL: accuracy and bytes per client, a table and a figure.

\b
Examples:
  afflux reproduce mf-ca2fl
  afflux reproduce mf-ca2fl --data mnist --jobs 1 --at-most 2 --out runs/mf
"""
CODECS_HELP = """Measure the error of every codec, on random vectors and on kept updates of a run: tables and a figure.

\b
Examples:
  afflux codecs
  afflux run --rule ca2fl --arrivals 400 --keep-updates --out runs/kept
  afflux codecs --updates digits=runs/kept/audit/ca2fl-seed0.updates.npy
"""

Seeds = Annotated[str, typer.Option(help="Separated by commas.")]
DataDir = Annotated[str | None, typer.Option(help="Folder of mnist.npz; default: AFFLUX_DATA.")]
AtMost = Annotated[int | None, typer.Option(min=1, help="Stop after so many runs; the same command continues.")]
ResumableFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder; default runs/<date and time>. A folder with finished runs of the same command is continued."
    ),
]

app = typer.Typer(
    help="Reproduce tables of papers; writes Markdown and JSON. Finished runs are kept.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("afl-table2", help=AFL_HELP)
def afl_table2(
    workers: Annotated[str, typer.Option(help="Workers per round of all: 5/10 or 20/100.")] = "5/10",
    steps: Annotated[int, typer.Option(help="Local steps: 5, and 10 for 5/10 workers.")] = 5,
    seeds: Seeds = "0",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: ResumableFolder = None,
) -> None:
    """Run Table 2 (see AFL_HELP)."""
    with report_errors():
        require(*EXTRA)
        from afflux.sim.papers import tables

        table = tables.afl_table2(workers, steps, data_dir)
        _reproduce(table, {"command": "afl-table2", "workers": workers, "steps": steps}, seeds, out, jobs, at_most)


@app.command("rules", help=RULES_HELP)
def rules_under_delays(
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seeds: Seeds = "0,1,2",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: ResumableFolder = None,
) -> None:
    """Run all presets (see RULES_HELP)."""
    with report_errors():
        require(*EXTRA)
        from afflux.sim.papers import tables

        table = tables.rules_under_delays(data, data_dir)
        _reproduce(table, {"command": "rules", "data": data}, seeds, out, jobs, at_most)


@app.command("mf-ca2fl", help=MF_CA2FL_HELP)
def mf_ca2fl_in_few_bits(
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seeds: Seeds = "0,1,2",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: ResumableFolder = None,
) -> None:
    """Run all codecs (see MF_CA2FL_HELP)."""
    with report_errors():
        require(*EXTRA)
        from afflux.sim.papers import tables

        table = tables.mf_ca2fl(data, data_dir)
        _reproduce(table, {"command": "mf-ca2fl", "data": data}, seeds, out, jobs, at_most)


def codecs(
    updates: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE.npy, the updates of a run with --keep-updates; again for more.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random vectors and of the codecs' random bits.")] = 0,
    out: OutFolder = None,
) -> None:
    """Measure errors (see CODECS_HELP)."""
    with report_errors():
        require(*EXTRA)
        from afflux.sim.papers import codec_errors

        command = {"command": "codecs", "updates": updates or [], "seed": seed}
        _publish(out, lambda measure: codec_errors.make_page(updates or [], seed), command)


def _reproduce(
    table: "Table", command: dict[str, Any], seeds: str, out: Path | None, processes: int | None, at_most: int | None
) -> None:
    numbers = parse_seeds(seeds)
    work = partial(table.reproduce, numbers)
    _publish(out, work, command | {"seeds": numbers}, processes=processes, at_most=at_most)


def _publish(
    out: Path | None, make: "Callable[[Measure], Page]", command: Mapping[str, Any], **options: int | None
) -> None:
    from afflux.sim.papers.publishing import publish

    page, folder = publish(out, make, command, **options)
    typer.echo(page.markdown)
    typer.echo(f"wrote {folder}/")
