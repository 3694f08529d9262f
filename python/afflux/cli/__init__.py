"""The command line: `afflux demo`, `compare`, `run`, `replay`, `reproduce`, `codecs`, `store`, `plan`, `bench`, ..."""

import signal
import sys
from typing import Annotated

from afflux import __version__
from afflux.cli import bench, listings, plan, selftest, store
from afflux.cli.options import INSTALLED, typer
from afflux.sim import interrupts

#: The commands that need packages of the extra `sim`.
SIMULATOR = ("demo", "compare", "run", "replay", "reproduce", "codecs")

app = typer.Typer(
    help="Asynchronous federated learning: the server's arithmetic, and a simulator around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables cut the names of options on a terminal of 80 columns
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"afflux {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


if INSTALLED:
    from afflux.cli import demo, reproduce, simulate
    from afflux.cli.common import Command

    app.command(help=demo.DEMO_HELP)(demo.demo)
    app.command(help=simulate.COMPARE_HELP)(simulate.compare)
    app.command(help=simulate.RUN_HELP)(simulate.run)
    app.command(help=simulate.REPLAY_HELP)(simulate.replay)
app.command(help=bench.HELP)(bench.bench)
app.command(help=listings.RULES_HELP)(listings.rules)
app.command(help=listings.PAPERS_HELP)(listings.papers)
if INSTALLED:
    app.add_typer(reproduce.app, name="reproduce")
    app.command(help=reproduce.CODECS_HELP)(reproduce.codecs)
app.add_typer(store.app, name="store")
app.command(help=plan.HELP)(plan.plan)
app.command(help=listings.BACKENDS_HELP)(listings.backends)
app.command(help=selftest.HELP)(selftest.selftest)
if INSTALLED:
    for command in (*app.registered_commands, *reproduce.app.registered_commands, *store.app.registered_commands):
        command.cls = Command


def main() -> None:
    """Run the command line. The process must end afterwards: Ctrl-C is ignored while the interpreter ends."""
    if not INSTALLED and sys.argv[1:2] and sys.argv[1] in SIMULATOR:
        sys.exit(f"afflux: {sys.argv[1]} needs typer: pip install 'afflux[sim]'")
    with interrupts.deferred(then=signal.SIG_IGN):
        app()
