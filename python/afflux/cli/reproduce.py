"""`afflux reproduce` and `afflux codecs`: tables, as Markdown, JSON and figures."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afflux.cli.common import OutFolder, Processes, parse_seeds, report_errors
from afflux.sim.errors import EXTRA, require

if TYPE_CHECKING:
    from afflux.sim.papers.publishing import Measure, Page

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
    arguments = {"workers": workers, "steps": steps, "seeds": seeds}
    _reproduce("afl_table2", "afl-table2", arguments, data_dir, out, jobs, at_most)


def _of_data(module: str, name: str, about: str) -> None:
    """Add the command that makes the table of a module of `afflux.sim.papers` on digits or MNIST."""

    def command(
        data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
        seeds: Seeds = "0,1,2",
        data_dir: DataDir = None,
        jobs: Processes = None,
        at_most: AtMost = None,
        out: ResumableFolder = None,
    ) -> None:
        _reproduce(module, name, {"data": data, "seeds": seeds}, data_dir, out, jobs, at_most)

    app.command(name, help=about)(command)


_of_data("rules_under_delays", "rules", RULES_HELP)
_of_data("mf_ca2fl", "mf-ca2fl", MF_CA2FL_HELP)


def _reproduce(
    module: str,
    name: str,
    arguments: dict[str, Any],
    data_dir: str | None,
    out: Path | None,
    processes: int | None,
    at_most: int | None,
) -> None:
    """Publish the page of `reproduce` of a module of `afflux.sim.papers`, whose arguments are these and the folder."""
    with report_errors():
        require(*EXTRA)
        arguments |= {"seeds": parse_seeds(arguments["seeds"])}
        reproduce = import_module(f"afflux.sim.papers.{module}").reproduce
        _publish(
            out, partial(reproduce, *arguments.values(), data_dir), {"command": name} | arguments, processes, at_most
        )


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


def _publish(
    out: Path | None,
    make: "Callable[[Measure], Page]",
    command: Mapping[str, Any],
    processes: int | None = None,
    at_most: int | None = None,
) -> None:
    from afflux.sim.papers.publishing import publish

    page, folder = publish(out, make, command, processes, at_most)
    typer.echo(page.markdown)
    typer.echo(f"wrote {folder}/")
