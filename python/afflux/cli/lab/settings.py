"""Shared by the simulator's commands: options, which typer reads, and settings of presets and tasks."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from afflux.cli.common import report_errors
from afflux.lab.presets.registry import find_preset
from afflux.ops.errors import ConfigError
from afflux.rules.specs import RuleSpec, parse_rule, rule_parameters
from afflux.sim.errors import EXTRA, require
from afflux.sim.workload.config import SimConfig, unlimit_arrivals, unread_settings

#: The settings in the output of --help; --help-all prints all of them.
COMMON = (
    *("task", "data", "data_dir", "model", "num_clients", "concurrency", "arrivals", "rounds", "delays"),
    *("partition", "alpha", "client_optimizer", "client_lr", "local_steps", "batch_size", "eval_every", "target"),
)
#: Lines are not broken behind it.
HYPHEN = "\N{NON-BREAKING HYPHEN}"
BufferSize = Annotated[int | None, typer.Option(help="Arrivals per server step, for rules with a buffer; default 10.")]
Paper = Annotated[
    str | None,
    typer.Option(help="Settings of a paper's experiment (afflux papers lists them); other options override them."),
]
ServerLr = Annotated[float | None, typer.Option(help="Server learning rate, for the rules that have one.")]
OutFolder = Annotated[Path | None, typer.Option(help="Run folder; default runs/<date and time>.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Number of processes; default: one per CPU.")]


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `config` of `command(config, context, ...)` by one option for each field of SimConfig.

    The settings of the preset `paper`, if it is not None, replace the defaults.
    """
    names = [field.name for field in fields(SimConfig)]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def annotation(field: Any) -> Any:
        text = re.sub(r"(?<=\w)-(?=\w)", HYPHEN, field.metadata["help"])
        kind = str if field.type == int | str else field.type
        return Annotated[kind, typer.Option(help=text, hidden=field.name not in COMMON)]

    options: dict[str, tuple[Any, Any]] = {one.name: (annotation(one), one.default) for one in fields(SimConfig)}
    more = typer.Option("--help-all", is_eager=True, callback=_print_all, help="Show all options and exit.")
    options["help_all"] = Annotated[bool, more], False
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]

    def wrapped(*, help_all: bool, context: typer.Context, **given: Any) -> None:
        with report_errors():
            settings = {name: given.pop(name) for name in names}
            if given["paper"] is not None:
                values = find_preset(given["paper"]).values()
                settings |= {name: value for name, value in values.items() if not is_on_command_line(context, name)}
                for name in unread_settings(settings):  # a value of the preset beside another one of the command line
                    if not is_on_command_line(context, name):
                        settings[name] = getattr(SimConfig, name)
            unlimit_arrivals(settings, is_on_command_line(context, "arrivals"))
            command(SimConfig(**settings), context, **given)

    wrapped.__name__ = command.__name__
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    signature = inspect.Signature([*keyword_only, *settings])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapped


class Command(typer.core.TyperCommand):
    """A command that takes each option once, unless the option is a list, and does not break names at hyphens."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; an option that is given twice is an error."""
        *_, order = self.make_parser(ctx).parse_args([*args])
        if twice := [option for option in order if order.count(option) > 1 and not option.multiple]:
            ctx.fail(f"{twice[0].opts[0]} is given twice")
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return the help, in which the hyphens are those that one types."""
        return super().get_help(ctx).replace(HYPHEN, "-")


def _print_all(context: typer.Context, wanted: bool) -> None:
    """Print the help with the rare options, too."""
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def settings_for_task(context: typer.Context, config: SimConfig, rules: list[RuleSpec]) -> SimConfig:
    """Return the settings, by default with the delays of the task itself; see `checked_settings`."""
    require(*EXTRA)
    from afflux.lab.runs.library import checked_settings

    typed = [field.name for field in fields(SimConfig) if is_on_command_line(context, field.name)]
    return checked_settings(config, typed, rules)


def split_rules(rules: str) -> list[str]:
    """Split rules at commas, but not inside parentheses, as in hinge(10,4)."""
    return re.split(r",(?![^(]*\))", rules)


def parse_seeds(text: str) -> list[int]:
    """Read seeds separated by commas; raise ConfigError if they are not different whole numbers from 0 on."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"seeds are whole numbers separated by commas, not {text!r}") from None
    if len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds must be 0 or more and different, not {text!r}")
    return seeds


def rules_of_preset(
    name: str, rules: list[str] | None, others: list[str], buffer_size: int | None, server_lr: float | None
) -> tuple[list[str], int | None, float | None]:
    """Complete the rules of the command line and their options by those of a preset.

    Args:
        name: of the preset.
        rules: of the command line, which have their own learning rates; None: that of the preset, then the others.
        others: see above.
        buffer_size: of the command line, which has priority.
        server_lr: of the command line, which has priority.

    Returns:
        The rules, and buffer size and learning rate for all rules that have one.
    """
    preset = find_preset(name)
    if rules is None:
        spec = preset.rule.value
        if preset.server_lr is not None and server_lr is None:
            server_lr = preset.server_lr.value
            if others:
                spec, server_lr = f"{spec}:server_lr={server_lr}", None
        rules = [spec, *(rule for rule in others if rule != parse_rule(spec).name)]
    if buffer_size is None and preset.buffer_size is not None:
        specs = [parse_rule(rule) for rule in rules]
        if any("buffer_size" in rule_parameters(one.name) and "buffer_size" not in dict(one.options) for one in specs):
            buffer_size = preset.buffer_size.value
    return rules, buffer_size, server_lr
