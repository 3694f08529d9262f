"""The commands of `python -m bench.papers`: tables, as Markdown, JSON and figures."""

from collections.abc import Callable, Sequence
from math import isnan
from pathlib import Path
from typing import Annotated

import typer

from afflux.cli.common import report_errors
from afflux.cli.lab.settings import Command, OutFolder, Processes, parse_seeds
from afflux.cli.lab.terminal import show_progress
from afflux.lab.publishing import Measure, Page, markdown_table, publish, write_page
from afflux.ops.validation import known
from bench.papers import codec_errors, reproduction, table_pages
from bench.papers.all_tables import TABLES
from bench.papers.paper_tables import PLANNED

LIST_HELP = """The papers' tables and figures: what each needs, whether it has run, the mean difference from the paper.

\b
Examples:
  python -m bench.papers list
  python -m bench.papers list --out runs/tables
"""
RUN_HELP = """Make the runs of a table, and its page; finished runs are kept. `list` has the tables.

\b
Examples:
  python -m bench.papers run afl-table2 --data-dir ~/data
  python -m bench.papers run rules --cells '*: ca2fl' --seeds 0 --hours 1
"""
MF_CA2FL_HELP = """MF-CA2FL with every codec beside CA2FL: accuracy and bytes per client, a table and a figure.

\b
Examples:
  python -m bench.papers mf-ca2fl
  python -m bench.papers mf-ca2fl --data mnist --jobs 1 --at-most 2 --out runs/mf
"""
CODECS_HELP = """Measure the error of every codec, on random vectors and on updates of a run: tables and a figure.

\b
Examples:
  python -m bench.papers codecs
  python -m bench.papers codecs --updates digits
  python -m bench.papers codecs --updates digits --updates mnist --data-dir ~/data
"""

DataDir = Annotated[str | None, typer.Option(help="Folder of mnist.npz; default: AFFLUX_DATA.")]
AtMost = Annotated[int | None, typer.Option(min=1, help="Stop after so many runs; the same command continues.")]
ResumableFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder; default runs/<date and time>. A folder with finished runs of the same command is continued."
    ),
]
#: The finished runs of the papers' tables.
RESULTS = Path("docs/results")
Results = Annotated[Path, typer.Option("--out", help="Folder of the finished runs and the pages; it is continued.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.command("list", help=LIST_HELP, cls=Command)
def list_tables(out: Results = RESULTS) -> None:
    """List the tables (see LIST_HELP)."""
    with report_errors():
        lines, states = [], reproduction.states(out)
        for state in states:
            row = state.table
            page = out / f"{row.name}.md"
            place = str(page) if page.exists() else ""
            progress = row.open or f"{state.runs} of {state.wanted} runs"
            if row.computed:
                progress = "made" if place else PLANNED
            difference = "" if isnan(state.difference) else f"{state.difference:.{row.reading.digits}f}"
            lines.append((row.name, row.paper, row.shows, row.needs, f"{row.hours:g}", progress, difference, place))
        header = ("table", "paper", "shows", "needs", "CPU h", "state", "difference", "page")
        typer.echo(markdown_table(header, lines))
        typer.echo(f"the finished runs in {out}/ took {sum(state.hours for state in states):.2f} CPU hours")
        if not out.is_dir():
            typer.echo(f"{out}/ is not here: --out names the folder of the finished runs, as that in a clone")


@app.command("run", help=RUN_HELP, cls=Command)
def run_table(
    table: Annotated[str, typer.Argument(help="A table of `list`.")],
    cells: Annotated[str, typer.Option(help="Only cells with such names; * is any text.")] = "*",
    seeds: Annotated[str | None, typer.Option(help="Separated by commas; default: those of the table.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Server steps of a run; 0: as in the paper.")] = 0,
    hours: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many CPU hours; the same command continues.")
    ] = None,
    at_most: AtMost = None,
    data_dir: DataDir = None,
    device: Annotated[str, typer.Option(help="Where clients train: cpu, cuda or cuda:NUMBER.")] = "cpu",
    jobs: Processes = None,
    out: Results = RESULTS,
) -> None:
    """Make the runs of a table (see RUN_HELP)."""
    with report_errors():
        known("table", table, TABLES)
        chosen = TABLES[table]
        numbers = range(chosen.seeds) if seeds is None else parse_seeds(seeds)
        limits = reproduction.Budget(at_most, hours, jobs)
        changes = reproduction.Changes(data_dir, rounds, device)
        page, left = reproduction.reproduce(
            chosen, out, numbers, pattern=cells, changes=changes, limits=limits, show=show_progress
        )
        for whole in reproduction.folder_pages(out, chosen):
            write_page(whole, out)
        typer.echo(page.markdown)
        state = f"{left} runs are left: the same command continues" if left else "all these runs are made"
        typer.echo(f"{state}; {out / table}.md shows all runs that {out}/ holds")


@app.command(cls=Command)
def check(
    table: Annotated[str | None, typer.Option(help="The table of the run; default any.")] = None,
    data_dir: DataDir = None,
    out: Results = RESULTS,
) -> None:
    """Make a finished run again, drawn at random, and compare it.

    The exit status is 1 if neither params nor accuracies could be compared.
    """
    with report_errors():
        checked = reproduction.check(out, data_dir, table)
        typer.echo("\n".join([*checked.lines, f"compared: {checked.compared or 'only the schedule'}"]))
    if not checked.compared:
        raise typer.Exit(1)


@app.command("mf-ca2fl", help=MF_CA2FL_HELP, cls=Command)
def mf_ca2fl(
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: ResumableFolder = None,
) -> None:
    """Make the table of all codecs (see MF_CA2FL_HELP)."""
    with report_errors():
        numbers = parse_seeds(seeds)
        command = ["mf-ca2fl", data, *map(str, numbers)]
        options = {"processes": jobs, "at_most": at_most}
        _publish(out, lambda measure: table_pages.mf_ca2fl(data, numbers, measure, data_dir), command, **options)


@app.command(help=CODECS_HELP, cls=Command)
def codecs(
    updates: Annotated[
        list[str] | None, typer.Option(help="digits or mnist: a run whose updates are measured, too; again for more.")
    ] = None,
    data_dir: DataDir = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random vectors and of the codecs' random bits.")] = 0,
    out: OutFolder = None,
) -> None:
    """Measure errors (see CODECS_HELP)."""
    with report_errors():
        command = ["codecs", f"seed {seed}", *(updates or [])]
        _publish(out, lambda measure: codec_errors.make_page(updates or [], seed, data_dir), command)


def _publish(out: Path | None, make: Callable[[Measure], Page], command: Sequence[str], **options: int | None) -> None:
    page, folder = publish(out, make, command, show=show_progress, **options)
    typer.echo(page.markdown)
    typer.echo(f"wrote {folder}/")
