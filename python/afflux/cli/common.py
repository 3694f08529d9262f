"""What commands share: options, how they are read, and how a mistake is told."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from afflux.ops.errors import AffluxError, UnavailableError
from afflux.sim.config import RuleSpec, SimConfig, parameters, parse
from afflux.sim.ctrl_c import Terminated
from afflux.sim.errors import ConfigError

BufferSize = Annotated[int | None, typer.Option(help="Arrivals per server step, for rules with a buffer; default 10.")]
ServerLr = Annotated[float | None, typer.Option(help="Server learning rate, for the rules that have one.")]
Out = Annotated[Path | None, typer.Option(help="Run folder; default runs/<date and time>.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes; default one a CPU.")]


@contextmanager
def friendly() -> Iterator[None]:
    """Turn a user's mistake into one line and exit code 2, Ctrl-C into 130, and SIGTERM, if it is heard, into 143."""
    try:
        yield
    except (AffluxError, UnavailableError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as error:
        typer.echo("stopped", err=True)
        raise typer.Exit(143 if isinstance(error, Terminated) else 130) from None


@contextmanager
def told_by_flags(**flags: str) -> Iterator[None]:
    """Call the arguments of a function in its errors what they are on the command line."""
    try:
        yield
    except AffluxError as error:
        text = str(error).removeprefix("[Server] ")
        raise AffluxError(re.sub(r"\b\w+\b", lambda word: flags.get(word[0], word[0]), text)) from None


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(config, ...)` one option for each field of SimConfig, in place of `config`."""
    names = [field.name for field in fields(SimConfig)]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    settings = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[field.type, typer.Option(help=field.metadata["help"])],
        )
        for field in fields(SimConfig)
    ]

    def wrapped(**given: Any) -> None:
        with friendly():
            command(SimConfig(**{name: given.pop(name) for name in names}), **given)

    wrapped.__name__ = command.__name__
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    signature = inspect.Signature([*keyword_only, *settings])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapped


def was_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_others(context: typer.Context, flag: str, *allowed: str) -> None:
    """Raise ConfigError if the command line has options that `flag`, which was given, takes from elsewhere."""
    for name in context.params:
        if name not in allowed and was_given(context, name):
            raise ConfigError(f"--{name.replace('_', '-')} was given, but {flag} goes on with the settings of the run")


def apart(rules: str) -> list[str]:
    """Rules separated by commas, but not by those inside parentheses, as in hinge(10,4)."""
    return re.split(r",(?![^(]*\))", rules)


def numbers(text: str) -> list[int]:
    """Seeds separated by commas; raises ConfigError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"seeds are whole numbers separated by commas, not {text!r}") from None
    if len(set(found)) != len(found) or min(found) < 0:
        raise ConfigError(f"seeds must be 0 or more and different, not {text!r}")
    return found


def specs_of(rules: list[str], **common: Any) -> list[RuleSpec]:
    """Read rules; options in `common` that are not None apply where a rule takes them. Raises ConfigError."""
    given = {option: value for option, value in common.items() if value is not None}
    specs = [parse(rule, {"buffer_size": 10} | given) for rule in rules]
    for option, value in given.items():
        flag = "--" + option.replace("_", "-")
        taken = [dict(spec.options)[option] for spec in specs if option in parameters(spec.name)]
        if not taken:
            raise ConfigError(f"{flag} was given, but {', '.join(rules)} does not take it")
        if value not in taken:
            raise ConfigError(f"{flag} is {value}, but {', '.join(rules)} says {option}={taken[0]} itself")
    if len({spec.label for spec in specs}) != len(specs):
        raise ConfigError(f"a rule is given twice: {', '.join(rules)}")
    for spec in specs:
        spec.build()
    return specs
