"""Shared by the commands: the parser of the core's, reading rules, and printing errors."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from afflux.lab.interrupts import Terminated
from afflux.ops.errors import AffluxError, ConfigError, UnavailableError
from afflux.ops.validation import printable
from afflux.rules.specs import RuleSpec, read_rules, rule_parameters
from afflux.sim.errors import text_with_notes


class Option(argparse.Action):
    """Stores the value of an option, True if it takes none; a second one is an error."""

    _is_set = False

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        """See argparse."""
        if self._is_set:
            parser.error(f"{self.option_strings[0]} is given twice")
        self._is_set = True
        setattr(namespace, self.dest, self.nargs == 0 or value)


class Parser(argparse.ArgumentParser):
    """The parser of a command of the core, or of a group of commands."""

    def __init__(self, **settings: Any) -> None:
        """Take options by their whole names only, and print the description as it is written."""
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._negative_number_matcher = re.compile(r"-\d")  # also -1,2, a list of clients, is no option

    def group(self) -> "argparse._SubParsersAction[Parser]":
        """Return the commands of a group; the group alone prints its help."""
        self.set_defaults(run=lambda arguments: self.exit(2, self.format_help()))
        return self.add_subparsers(title="commands", metavar="COMMAND")

    def option(self, *names: str, **settings: Any) -> None:
        """Add an option, with the settings of `add_argument`."""
        self.add_argument(*names, action=Option, **settings)

    def flag(self, *names: str, **settings: Any) -> None:
        """Add an option without a value."""
        self.option(*names, nargs=0, default=False, **settings)


def add_command(
    commands: "argparse._SubParsersAction[Parser]", run: Callable[[argparse.Namespace], None], text: str
) -> Parser:
    """Add a command under the name of the function that runs it; `text` is its help."""
    parser = commands.add_parser(run.__name__, help=text.partition("\n")[0], description=text)
    parser.set_defaults(run=run)
    return parser


def positive_integer(text: str) -> int:
    """Read a whole number from 1 on; argparse's errors have the name of this function."""
    if int(text) < 1:
        raise ValueError
    return int(text)


positive_integer.__name__ = "whole number from 1 on"


def echo(text: str, *, err: bool = False) -> None:
    """Print lines of text, on stderr if `err`. Names of stores, logs and folders in them may hold control sequences."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr if err else sys.stdout, flush=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error and exit with code 2; on Ctrl-C exit with 130, on a handled SIGTERM with 143."""
    try:
        yield
    except (AffluxError, UnavailableError) as error:
        echo(f"error: {text_with_notes(error)}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt as error:
        echo("\n".join([*getattr(error, "__notes__", ()), "stopped"]), err=True)
        raise SystemExit(143 if isinstance(error, Terminated) else 130) from None


@contextmanager
def flag_names_in_errors(**flags: str) -> Iterator[None]:
    """Replace names of arguments in errors by the flags of the command line."""
    try:
        yield
    except AffluxError as error:
        text = str(error).removeprefix("[Server] ")
        raise AffluxError(re.sub(r"\b\w+\b", lambda word: flags.get(word[0], word[0]), text)) from None


def parse_rules(rules: list[str], **common: Any) -> list[RuleSpec]:
    """Read rules, and check that each can be built.

    Args:
        rules: NAME or NAME:OPTION=VALUE:..., each after LABEL= if it has a label.
        common: options for every rule that takes them; None: not given.

    Returns:
        The rules.

    Raises:
        ConfigError: an unknown rule or option, an option of `common` that no rule takes, or a rule given twice.
    """
    given = {option: value for option, value in common.items() if value is not None}
    specs = read_rules(rules, {"buffer_size": None} | given)
    for option, value in given.items():
        flag = "--" + option.replace("_", "-")
        taken = [dict(spec.options)[option] for spec in specs if option in rule_parameters(spec.name)]
        if not taken:
            raise ConfigError(f"{flag} was given, but {', '.join(rules)} does not take it")
        if value not in taken:
            raise ConfigError(f"{flag} is {value}, but {', '.join(rules)} says {option}={taken[0]} itself")
    return specs
