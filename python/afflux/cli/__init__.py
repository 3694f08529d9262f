"""The command line: `afflux store`, `plan`, `bench`, ... by argparse, and the simulator's commands by typer."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from afflux import __version__
from afflux.cli import bench, listings, plan, selftest, store
from afflux.cli.common import Parser, report_errors
from afflux.lab import interrupts

#: The simulator's commands, in `afflux.cli.lab.app`; they need packages of the extra `lab`.
SIMULATOR = {
    "demo": "A rule of each paper on handwritten digits; a run that is killed and resumed.",
    "compare": "Compare aggregation rules in one simulation.",
    "run": "Simulate one aggregation rule with one seed.",
}
#: Commands of 0.1.0 that are now in a checkout.
MOVED = {"reproduce": "python -m bench.papers list, run or check", "codecs": "python -m bench.papers codecs"}


def parser() -> Parser:
    """Return the parser of the core's commands, which also lists those of the simulator."""
    text = "Asynchronous federated learning: the server's arithmetic, and a simulator around it."
    parser = Parser(prog="afflux", description=text)
    parser.add_argument("--version", action="version", version=f"afflux {__version__}", help="Print the version.")
    commands = parser.group()
    for name, text in SIMULATOR.items():
        commands.add_parser(name, help=text)
    for module in (listings, store, plan, bench, selftest):
        module.add_to(commands)
    return parser


def run_core(command_line: Sequence[str]) -> None:
    """Run a command of the core."""
    if {*command_line[:1]} & MOVED.keys():
        sys.exit(f"afflux: {command_line[0]} is now, in a checkout of afflux: {MOVED[command_line[0]]}")
    arguments = parser().parse_args(command_line)
    try:
        with report_errors():
            arguments.run(arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # of `afflux rules | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def main() -> None:
    """Run the command line. The process must end afterwards: Ctrl-C is ignored while the interpreter ends."""
    command_line = sys.argv[1:]
    with interrupts.deferred(then=signal.SIG_IGN):
        if not {*command_line[:1]} & SIMULATOR.keys():
            run_core(command_line)
        elif find_spec("typer") is None:
            sys.exit(f"afflux: {command_line[0]} needs typer: pip install 'afflux[lab]'")
        else:
            from afflux.cli.lab.app import app

            app()
