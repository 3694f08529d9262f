"""`afflux reproduce`: tables of papers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afflux.cli.common import Out, Processes, friendly, numbers

if TYPE_CHECKING:
    from afflux.sim.papers.common import Page

AFL_HELP = """Anarchic FL, Table 2: logistic regression on MNIST, ours beside the paper's.

[bold]Examples[/bold]

  afflux reproduce afl-table2 --seeds 0,1,2

  afflux reproduce afl-table2 --workers 20/100 --data-dir ~/data
"""
RULES_HELP = """Every preset under FADAS's mild and large delays: a table and a picture.

[bold]Examples[/bold]

  afflux reproduce rules

  afflux reproduce rules --data mnist --seeds 0
"""

Seeds = Annotated[str, typer.Option(help="Separated by commas.")]
DataDir = Annotated[str | None, typer.Option(help="Folder of mnist.npz; default: AFFLUX_DATA.")]

app = typer.Typer(help="Run tables of papers again; writes Markdown and JSON.", no_args_is_help=True)


@app.command("afl-table2", help=AFL_HELP)
def afl_table2(
    workers: Annotated[str, typer.Option(help="Workers per round of all: 5/10 or 20/100.")] = "5/10",
    steps: Annotated[int, typer.Option(help="Local steps: 5, and 10 for 5/10 workers.")] = 5,
    seeds: Seeds = "0",
    data_dir: DataDir = None,
    jobs: Processes = None,
    out: Out = None,
) -> None:
    """Run Table 2 (see AFL_HELP)."""
    with friendly():
        from afflux.sim.papers import afl

        _publish(out, lambda: afl.reproduce(workers, steps, numbers(seeds), data_dir, jobs))


@app.command("rules", help=RULES_HELP)
def rules_under_delays(
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seeds: Seeds = "0,1,2",
    data_dir: DataDir = None,
    jobs: Processes = None,
    out: Out = None,
) -> None:
    """Run all presets (see RULES_HELP)."""
    with friendly():
        from afflux.sim.papers import rules

        _publish(out, lambda: rules.reproduce(data, numbers(seeds), data_dir, jobs))


def _publish(out: Path | None, make: "Callable[[], Page]") -> None:
    from afflux.sim.papers.common import publish

    page, folder = publish(out, make)
    typer.echo(page.markdown)
    typer.echo(f"wrote {folder}/")
