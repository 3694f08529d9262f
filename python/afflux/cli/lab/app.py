"""The simulator's commands: demo, compare and run."""

import typer

from afflux.cli.lab import demo, simulate
from afflux.cli.lab.settings import Command

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables cut the names of options on a terminal of 80 columns
)
app.command(help=demo.DEMO_HELP)(demo.demo)
app.command(help=simulate.COMPARE_HELP)(simulate.compare)
app.command(help=simulate.RUN_HELP)(simulate.run)
for command in app.registered_commands:
    command.cls = Command
