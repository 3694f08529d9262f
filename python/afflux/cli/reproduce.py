"""`afflux reproduce` and `afflux codecs`: tables, as Markdown, JSON and figures."""

from collections.abc import Callable, Mapping
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afflux.cli.common import report_errors
from afflux.cli.settings import OutFolder, Processes, parse_seeds
from afflux.sim.errors import EXTRA, require
from afflux.sim.papers.all_tables import TABLES
from afflux.sim.papers.paper_tables import PLANNED, Table

if TYPE_CHECKING:
    from afflux.sim.papers.publishing import Measure, Page

TABLE_HELP = """{paper}, {shows}. {needs}; {runs} runs, {hours:.2g} CPU hours.

\b
Examples:
  afflux reproduce {name} --data-dir ~/data
  afflux reproduce {name} --cells '{cell}' --seeds 0 --hours 1
"""
LIST_HELP = """The papers' tables and figures: what each needs, whether it has run, the mean difference from the paper.

\b
Examples:
  afflux reproduce list
  afflux reproduce list --out runs/tables
"""
MF_CA2FL_HELP = """MF-CA2FL with every codec beside CA2FL: accuracy and bytes per client, a table and a figure.

\b
Examples:
  afflux reproduce mf-ca2fl
  afflux reproduce mf-ca2fl --data mnist --jobs 1 --at-most 2 --out runs/mf
"""
CODECS_HELP = """Measure the error of every codec, on random vectors and on updates of a run: tables and a figure.

\b
Examples:
  afflux codecs
  afflux codecs --updates digits
  afflux codecs --updates digits --updates mnist --data-dir ~/data
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

app = typer.Typer(rich_markup_mode=None)


#: The finished runs of the papers' tables.
RESULTS = Path("docs/results")
Results = Annotated[Path, typer.Option("--out", help="Folder of the finished runs and the pages; it is continued.")]


@app.callback(invoke_without_command=True)
def check_a_run(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Make a finished run again, drawn at random, and compare it.")
    ] = False,
    table: Annotated[str | None, typer.Option(help="With --check: the table of the run; default any.")] = None,
    data_dir: DataDir = None,
    out: Results = RESULTS,
) -> None:
    """Reproduce tables of papers; writes Markdown, JSON and pictures. Finished runs are kept."""
    if not check:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
        return
    with report_errors():
        require(*EXTRA)
        from afflux.sim.papers import reproduction

        typer.echo("\n".join(reproduction.check(out, data_dir, table)))


@app.command("list", help=LIST_HELP)
def list_tables(out: Results = RESULTS) -> None:
    """List the tables (see LIST_HELP)."""
    with report_errors():
        require(*EXTRA)
        from afflux.sim.papers import reproduction
        from afflux.sim.papers.publishing import markdown_table

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


def _table_command(table: Table) -> Callable[..., None]:
    def run(
        cells: Annotated[str, typer.Option(help="Only cells with such names; * is any text.")] = "*",
        seeds: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(map(str, range(table.seeds))),
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
        with report_errors():
            require(*EXTRA)
            from afflux.cli.terminal import show_progress
            from afflux.sim.papers import reproduction
            from afflux.sim.papers.publishing import write_page

            limits = reproduction.Budget(at_most, hours, jobs)
            changes = reproduction.Changes(data_dir, rounds, device)
            page, left = reproduction.reproduce(
                table, out, parse_seeds(seeds), pattern=cells, changes=changes, limits=limits, show=show_progress
            )
            for whole in reproduction.folder_pages(out, table):
                write_page(whole, out)
            typer.echo(page.markdown)
            state = f"{left} runs are left: the same command continues" if left else "all these runs are made"
            typer.echo(f"{state}; {out / table.name}.md shows all runs that {out}/ holds")

    return run


for _table in TABLES.values():
    _facts = {name: getattr(_table, name) for name in ("name", "paper", "shows", "needs", "hours")}
    _help = TABLE_HELP.format(**_facts, runs=_table.count, cell=_table.cells[0].name if _table.cells else "*")
    # A table that is not run here has a command, too, which says why.
    app.command(_table.name, help=_table.open or _help, hidden=bool(_table.open))(_table_command(_table))


@app.command("mf-ca2fl", help=MF_CA2FL_HELP)
def mf_ca2fl(
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seeds: Seeds = "0,1,2",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: ResumableFolder = None,
) -> None:
    """Make the table of all codecs (see MF_CA2FL_HELP)."""
    with report_errors():
        require(*EXTRA)
        from afflux.sim.papers.table_pages import mf_ca2fl

        numbers = parse_seeds(seeds)
        command = {"command": "mf-ca2fl", "data": data, "seeds": numbers}
        options = {"processes": jobs, "at_most": at_most}
        _publish(out, lambda measure: mf_ca2fl(data, numbers, measure, data_dir), command, **options)


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
        require(*EXTRA)
        from afflux.sim.papers import codec_errors

        command = {"command": "codecs", "updates": updates or [], "seed": seed}
        _publish(out, lambda measure: codec_errors.make_page(updates or [], seed, data_dir), command)


def _publish(
    out: Path | None, make: "Callable[[Measure], Page]", command: Mapping[str, Any], **options: int | None
) -> None:
    from afflux.cli.terminal import show_progress
    from afflux.sim.papers.publishing import publish

    page, folder = publish(out, make, command, show=show_progress, **options)
    typer.echo(page.markdown)
    typer.echo(f"wrote {folder}/")
