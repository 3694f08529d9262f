"""The part of typer that the core's commands use, over argparse: it takes typer's place where typer is not installed.

A command is declared once, as a function whose parameters are annotated with `Option` and `Argument`.
"""

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

Context = Any
core = SimpleNamespace(TyperCommand=object)


class Exit(SystemExit):
    """Ends the process with a code."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)


@dataclass
class _Parameter:
    names: tuple[str, ...]
    settings: dict[str, Any]


def Option(*names: str, **settings: Any) -> Any:
    """Declare an option of a command."""
    return _Parameter(names, settings)


def Argument(**settings: Any) -> Any:
    """Declare a positional argument of a command."""
    return _Parameter((), settings | {"positional": True})


def echo(text: str, err: bool = False) -> None:
    """Print a text, on stderr if `err`."""
    print(text, file=sys.stderr if err else sys.stdout, flush=True)


def confirm(question: str) -> bool:
    """Ask for a yes on the terminal; the end of the input is a no."""
    try:
        return input(f"{question} [y/N]: ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


class _Once(argparse.Action):
    """Stores the value of an option; refuses a second one."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        if option is not None and getattr(namespace, self.dest) is not self.default:
            parser.error(f"{option} is given twice")
        setattr(namespace, self.dest, value)


@dataclass
class _Command:
    run: Callable[..., None]
    help: str
    cls: Any = None
    name: str = ""


@dataclass
class Typer:
    """A group of commands.

    Args:
        help: the first line of the help.
        settings: typer's other settings, which have no meaning here.
    """

    help: str
    registered_commands: list[_Command]
    groups: dict[str, "Typer"]
    version: Callable[[bool], None] | None = field(default=None)

    def __init__(self, help: str = "", **settings: Any) -> None:
        self.help, self.registered_commands, self.groups, self.version = help, [], {}, None

    def command(self, help: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add a command under the function's name."""

        def add(run: Callable[..., None]) -> Callable[..., None]:
            self.registered_commands.append(_Command(run, help, name=run.__name__))
            return run

        return add

    def callback(self) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Take the option --version from the function of the group."""

        def add(run: Callable[..., None]) -> Callable[..., None]:
            (parameter,) = inspect.signature(run, eval_str=True).parameters.values()
            self.version = get_args(parameter.annotation)[1].settings["callback"]
            return run

        return add

    def add_typer(self, app: "Typer", name: str) -> None:
        """Add a group of commands."""
        self.groups[name] = app

    def __call__(self) -> NoReturn:
        """Run the command of the process's command line."""
        values = vars(self._fill(argparse.ArgumentParser("afflux", allow_abbrev=False)).parse_args())
        if values.pop("version", False) and self.version is not None:
            self.version(True)
        run = values.pop("run")
        run(**values)
        raise Exit

    def _fill(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.description = self.help
        if self.version is not None:
            parser.add_argument("--version", action="store_true", help="Print the version.")
        parser.set_defaults(run=lambda: parser.exit(2, parser.format_help()))
        commands = parser.add_subparsers(title="commands", metavar="COMMAND")
        for name, group in self.groups.items():
            group._fill(commands.add_parser(name, help=group.help, allow_abbrev=False))
        for command in self.registered_commands:
            text = command.help.replace("\b\n", "")
            one = commands.add_parser(
                command.name,
                help=text.partition("\n")[0],
                description=text,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            one.set_defaults(run=command.run)
            for parameter in inspect.signature(command.run, eval_str=True).parameters.values():
                _add(one, parameter)
        return parser


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    """Add a function's parameter to the parser of its command."""
    kind, declared = get_args(parameter.annotation)
    kinds = [one for one in (get_args(kind) or (kind,)) if one is not type(None)]
    settings: dict[str, Any] = {"help": (declared.settings.get("help") or "").replace("%", "%%")}
    required = parameter.default is parameter.empty
    names = declared.names or (f"--{parameter.name.replace('_', '-')}",)
    if kinds == [bool]:
        parser.add_argument(*names, dest=parameter.name, action="store_true", **settings)
        return
    settings |= {"type": _reader(kinds[0], declared.settings.get("min")), "metavar": kinds[0].__name__.upper()}
    if declared.settings.get("positional"):
        more = {} if required else {"nargs": "?", "default": parameter.default}
        parser.add_argument(parameter.name, **settings | {"metavar": parameter.name.upper()} | more)
    else:
        default = None if required else parameter.default
        parser.add_argument(*names, dest=parameter.name, action=_Once, required=required, default=default, **settings)


def _reader(kind: type, least: int | None) -> Callable[[str], Any]:
    """Return the function that reads a value: its name is in argparse's message of a wrong one."""
    if kind is not int or least is None:
        return Path if kind is Path else kind

    def integer(text: str) -> int:
        if int(text) < least:
            raise ValueError
        return int(text)

    integer.__name__ = f"whole number from {least} on"
    return integer
