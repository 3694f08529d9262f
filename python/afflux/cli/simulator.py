"""The simulator's commands: demo, compare, run, reproduce and codecs."""

import typer

from afflux.cli import demo, reproduce, simulate
from afflux.cli.settings import Command

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables cut the names of options on a terminal of 80 columns
)
app.command(help=demo.DEMO_HELP)(demo.demo)
app.command(help=simulate.COMPARE_HELP)(simulate.compare)
app.command(help=simulate.RUN_HELP)(simulate.run)
app.add_typer(reproduce.app, name="reproduce")
app.command(help=reproduce.CODECS_HELP)(reproduce.codecs)
for command in (*app.registered_commands, *reproduce.app.registered_commands):
    command.cls = Command
