"""A command of `afflux` in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from afflux.cli import SIMULATOR, run_core


class Typed(io.StringIO):
    """Lines that are typed, which a terminal shows."""

    def readline(self, *limit):
        line = super().readline(*limit)
        print(line, end="")
        return line


class Ended(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def invoke(*arguments, input=""):
    """The end of a command of the core, or of typer's result of a command of the simulator."""
    command_line = list(map(str, arguments))
    if command_line[0] in SIMULATOR:
        from typer.testing import CliRunner

        from afflux.cli.lab.app import app

        return CliRunner().invoke(app, command_line, input=input)
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(stdout), redirect_stderr(stderr), patch.object(sys, "stdin", Typed(input)):
        try:
            run_core(command_line)
        except SystemExit as end:
            code = end.code
    return Ended(code, stdout.getvalue(), stderr.getvalue())


def check_exit(code, *arguments, **more):
    """The end of a command, which must have this exit code."""
    end = invoke(*arguments, **more)
    assert end.exit_code == code, end.stdout + end.stderr
    return end
