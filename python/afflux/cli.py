"""The command line: `afflux compare`, `run`, `replay`, `reproduce`, `codecs`, `bench`, `rules`, `backends`."""

import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from afflux import __version__, ops
from afflux.errors import AffluxError, UnavailableError
from afflux.rules import RULES
from afflux.sim import ctrl_c
from afflux.sim.config import RuleSpec, SimConfig, parameters, parse
from afflux.sim.errors import ConfigError, require

if TYPE_CHECKING:
    from afflux.sim.compare import Job
    from afflux.sim.papers.common import Measure, Page
    from afflux.sim.result import RunResult

try:
    import typer
except ModuleNotFoundError:
    sys.exit("afflux: the command line needs typer: pip install 'afflux[sim]'")

from afflux.bench import command

app = typer.Typer(
    help="Asynchronous federated learning: the server's arithmetic, and a simulator around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

COMPARE_HELP = f"""Compare aggregation rules in one simulation.

With one seed every rule sees the same clients, delays and batches. \
A rule is written NAME or NAME:OPTION=VALUE:OPTION=VALUE; `afflux rules` explains each. \
NAME may be path/to/file.py:FUNCTION: that file is executed, as your own code.

[bold]Rules[/bold]  {", ".join(RULES)}

[bold]Examples[/bold]

  afflux compare --rules fedbuff,fedasync,ca2fl --data digits

  afflux compare --rules 'fedbuff,fedbuff:staleness=hinge(10,4)' --seeds 0,1,2

  afflux compare --rules fedbuff,ca2fl --model logreg --alpha 0.3

  afflux compare --rules fedbuff,wkafl,fadas --paired
"""
RUN_HELP = """Simulate one aggregation rule with one seed.

[bold]Examples[/bold]

  afflux run --rule fedbuff

  afflux run --rule fedasync:alpha=0.3 --delays fadas-mild --seed 7 --out runs/mild

  afflux run --rule fedbuff --keep-updates --out runs/kept
"""
REPLAY_HELP = """Feed the updates of a run that kept them to other rules.

LOG is an audit log, audit/RULE-seedK.jsonl in the folder of a run with --keep-updates. \
A client that was dispatched after k arrivals pulls each rule's version as of k arrivals, so staleness is each rule's \
own; but it trained from the model of the log's rule. What differs is the aggregation alone. \
The log's own rule gives the log's own params, bit for bit.

[bold]Examples[/bold]

  afflux replay runs/kept/audit/fedbuff-seed0.jsonl

  afflux replay runs/kept/audit/fedbuff-seed0.jsonl --rule ca2fl --rule fadas:server_lr=0.01
"""
PAIRED = (
    "All rules get one stream of updates: clients train from the params of the first rule. Shows what the aggregation "
    "alone does with the same updates; says nothing about how clients would learn under the other rules."
)
KEEP_UPDATES = "Keep all update vectors beside the audit log, 4 d bytes each, for `afflux replay`."

BufferSize = Annotated[int | None, typer.Option(help="Arrivals per server step, for rules with a buffer; default 10.")]
ServerLr = Annotated[float | None, typer.Option(help="Server learning rate, for the rules that have one.")]
KeepUpdates = Annotated[bool, typer.Option("--keep-updates", help=KEEP_UPDATES)]
Out = Annotated[Path | None, typer.Option(help="Run folder; default runs/<date and time>.")]


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


@contextmanager
def friendly() -> Iterator[None]:
    """Turn a user's mistake into one line and exit code 2, and Ctrl-C into 130."""
    try:
        yield
    except (AffluxError, UnavailableError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None


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


@app.command(help=COMPARE_HELP)
@with_settings
def compare(
    config: SimConfig,
    rules: Annotated[str, typer.Option(help="Separated by commas.")] = "fedbuff,fedasync,ca2fl",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    paired: Annotated[bool, typer.Option("--paired", help=PAIRED)] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default one a CPU.")] = None,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    keep_updates: KeepUpdates = False,
    out: Out = None,
) -> None:
    """Compare rules (see COMPARE_HELP)."""
    specs = _specs(_apart(rules), buffer_size=buffer_size, server_lr=server_lr)
    _simulate(specs, _numbers(seeds), config, jobs, out, keep_updates, paired=paired)


@app.command(help=RUN_HELP)
@with_settings
def run(
    config: SimConfig,
    rule: Annotated[str, typer.Option(help="The rule.")],
    seed: Annotated[int, typer.Option(min=0, help="The seed.")] = 0,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    keep_updates: KeepUpdates = False,
    out: Out = None,
) -> None:
    """Simulate one rule (see RUN_HELP)."""
    specs = _specs([rule], buffer_size=buffer_size, server_lr=server_lr)
    _simulate(specs, [seed], config, 1, out, keep_updates)


@app.command(help=REPLAY_HELP)
def replay(
    log: Annotated[Path, typer.Argument(help="The audit log.")],
    rule: Annotated[list[str] | None, typer.Option(help="May be given several times; default the log's own.")] = None,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of mnist.npz, if it is not the log's.")] = None,
    out: Out = None,
) -> None:
    """Feed kept updates to rules (see REPLAY_HELP)."""
    with friendly():
        _replay(log, rule, {"buffer_size": buffer_size, "server_lr": server_lr}, data_dir, out)


app.command(help=command.HELP)(command.bench)


@app.command()
def rules(name: Annotated[str | None, typer.Argument(help="A rule; default all, in short.")] = None) -> None:
    """Print the presets: their formulas, options and defaults."""
    from afflux.sim.presets import details, overview

    with friendly():
        for line in overview() if name is None else details(name):
            typer.echo(line)


Seeds = Annotated[str, typer.Option(help="Separated by commas.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes; default one a CPU.")]
DataDir = Annotated[str | None, typer.Option(help="Folder of mnist.npz; default: AFFLUX_DATA.")]
AtMost = Annotated[int | None, typer.Option(min=1, help="Stop after so many runs; the same command goes on.")]
Table = Annotated[Path | None, typer.Option(help="Folder; default runs/<date and time>. One that was left goes on.")]

reproduce = typer.Typer(
    help="Run tables of papers again; writes Markdown and JSON. Ctrl-C keeps the runs that have ended.",
    no_args_is_help=True,
)
app.add_typer(reproduce, name="reproduce")


@reproduce.command("afl-table2")
def afl_table2(
    workers: Annotated[str, typer.Option(help="Workers per round of all: 5/10 or 20/100.")] = "5/10",
    steps: Annotated[int, typer.Option(help="Local steps: 5, and 10 for 5/10 workers.")] = 5,
    seeds: Seeds = "0",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: Table = None,
) -> None:
    """Anarchic FL, Table 2: logistic regression on MNIST, ours beside the paper's."""
    with friendly():
        from afflux.sim.papers import afl

        _publish(out, jobs, at_most, lambda measure: afl.reproduce(workers, steps, _numbers(seeds), data_dir, measure))


@reproduce.command("rules")
def rules_under_delays(
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seeds: Seeds = "0,1,2",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: Table = None,
) -> None:
    """Every preset under FADAS's mild and large delays: a table and a picture."""
    with friendly():
        from afflux.sim.papers import rules

        _publish(out, jobs, at_most, lambda measure: rules.reproduce(data, _numbers(seeds), data_dir, measure))


@reproduce.command("mf-ca2fl")
def mf_ca2fl_at_few_bits(
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seeds: Seeds = "0,1,2",
    data_dir: DataDir = None,
    jobs: Processes = None,
    at_most: AtMost = None,
    out: Table = None,
) -> None:
    """MF-CA2FL with every codec beside CA2FL: accuracy and bytes per client."""
    with friendly():
        from afflux.sim.papers import mf_ca2fl

        _publish(out, jobs, at_most, lambda measure: mf_ca2fl.reproduce(data, _numbers(seeds), data_dir, measure))


@app.command("codecs")
def errors_of_codecs(
    updates: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE.npy, the updates of a run with --keep-updates; again for more.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn vectors, and of the codecs' random bits.")] = 0,
    out: Out = None,
) -> None:
    """Measure the error of every codec, on drawn vectors and on updates of your own."""
    with friendly():
        from afflux.sim import codec_errors

        _publish(out, None, None, lambda measure: codec_errors.page(updates or [], seed))


def _publish(out: Path | None, processes: int | None, at_most: int | None, make: "Callable[[Measure], Page]") -> None:
    from afflux.sim.papers.common import publish

    page, folder = publish(out, make, processes, at_most)
    typer.echo(page.markdown)
    typer.echo(f"wrote {folder}/")


@app.command()
def backends() -> None:
    """Print what the engine was compiled for, what runs here and what is chosen."""
    with friendly():
        for backend in ops.backends():
            state = "chosen" if backend.chosen else "runs here" if backend.runs else backend.why_not
            typer.echo(f"{backend.name:<10}{backend.device:<6}{state}")


def _apart(rules: str) -> list[str]:
    # At the commas that are not inside parentheses, as in hinge(10,4).
    return re.split(r",(?![^(]*\))", rules)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"seeds are whole numbers separated by commas, not {text!r}") from None
    if len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise ConfigError(f"seeds must be 0 or more and different, not {text!r}")
    return numbers


def _specs(rules: list[str], **common: Any) -> list[RuleSpec]:
    given = {option: value for option, value in common.items() if value is not None}
    specs = [parse(rule, {"buffer_size": 10} | given) for rule in rules]
    for option in given:
        if not any(option in parameters(spec.name) for spec in specs):
            flag = "--" + option.replace("_", "-")
            raise ConfigError(f"{flag} was given, but {', '.join(rules)} does not take it")
    if len({spec.label for spec in specs}) != len(specs):
        raise ConfigError(f"a rule is given twice: {', '.join(rules)}")
    for spec in specs:
        spec.build()
    return specs


def _simulate(
    specs: list[RuleSpec],
    seeds: list[int],
    config: SimConfig,
    processes: int | None,
    out: Path | None,
    keep_updates: bool,
    *,
    paired: bool = False,
) -> None:
    require("torch", "sklearn", "matplotlib", "rich")
    from rich.console import Console

    from afflux.sim import report, terminal
    from afflux.sim.compare import available_cpus, compare, jobs_of

    jobs = jobs_of(specs, seeds, paired=paired)
    finished: dict[int, list[RunResult]] = {}
    with _run_folder(out, jobs, config, finished) as folder:
        keep = report.audit_folder(folder, config, len(jobs), keep_updates, partial(typer.echo, err=True))
        with terminal.progress(jobs, config, Console(stderr=True)) as watch:
            results = compare(
                jobs, config, processes=processes or available_cpus(), watch=watch, keep=keep, finished=finished
            )
        report.write(folder, results, config)
    _show(folder, results, config)


def _replay(
    path: Path, rules: list[str] | None, common: dict[str, Any], data_dir: str | None, out: Path | None
) -> None:
    require("torch", "matplotlib", "rich")
    from rich.console import Console

    from afflux.sim import audit, report, terminal
    from afflux.sim.compare import Job
    from afflux.sim.replay import config_of, replay

    log = audit.read(path)
    specs = _specs(rules, **common) if rules else [log.spec()]
    config = config_of(log, data_dir)
    if (missing := log.planned - config.arrivals) > 0:
        typer.echo(f"{path} was cut off: it lacks {missing} of {log.planned} arrivals", err=True)
    jobs = [Job(specs[0], log.header.seed, tuple(specs[1:]))]
    with _run_folder(out, jobs, config, {}) as folder:
        keep = report.audit_folder(folder, config, 1)
        with terminal.progress(jobs, config, Console(stderr=True)) as watch:
            results = replay(log, specs, config, partial(watch, 0), keep.folder)
        report.write(folder, results, config)
    _show(folder, results, config)
    for result in results:
        same = ", as in the log" if log.end is not None and result.digest == log.end.params_sha256 else ""
        typer.echo(f"params of {result.spec.label}: sha256 {result.digest}{same}")
    if not rules and log.end is not None and results[0].digest != log.end.params_sha256:
        typer.echo(f"error: the log says {log.end.params_sha256}: the rule, or what it runs on, has changed", err=True)
        raise typer.Exit(1)


@contextmanager
def _run_folder(
    out: Path | None, jobs: "list[Job]", config: SimConfig, finished: "dict[int, list[RunResult]]"
) -> Iterator[Path]:
    """Make the run folder; if the work in it ends early, keep what is complete, or else remove it."""
    from afflux.sim import report

    folder = report.new_folder(out)
    try:
        yield folder
    except BaseException:
        results = [result for index in sorted(finished) for result in finished[index]]
        if results:
            report.write(folder, results, config)
        if report.tidied(folder):
            typer.echo(f"{len(finished)} of {len(jobs)} runs were finished; kept {folder}/", err=True)
        raise


def _show(folder: Path, results: "list[RunResult]", config: SimConfig) -> None:
    from rich.console import Console

    from afflux.sim import report, terminal

    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=200)
    screen.print(report.headline(config, results), highlight=False)
    screen.print(terminal.table(results, config))
    screen.print(f"wrote {folder}/", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line, as the last thing that this process does: Ctrl-C is ignored while the interpreter ends."""
    with ctrl_c.held(then=signal.SIG_IGN):
        app()


if __name__ == "__main__":
    main()
