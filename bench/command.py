"""The command `python -m bench`. It imports the modules of the benchmark only when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from afflux import ops

DEFAULT_ROWS = "ingest,gram,fedbuff,fedbuff-bf16,ca2fl,fadas,wkafl"

QUICK = "A trial that everything works: small vectors, 3 repeats. Its figures say nothing about speed."


def bench(
    context: typer.Context,
    rows: Annotated[str, typer.Option(help="Operations by name, or all, scaling, peers; see --list.")] = DEFAULT_ROWS,
    d: Annotated[int | None, typer.Option("-d", min=1, help="Length of the vectors; default: see --list.")] = None,
    m: Annotated[int | None, typer.Option("-M", min=1, help="Updates a round; default: see --list.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all usable cores. A push takes one.")] = None,
    isa: Annotated[str | None, typer.Option(help="Instruction set of afflux; default: the best one here.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples of each contender; default 20.")] = None,
    sets: Annotated[int, typer.Option(min=2, help="Input sets that take turns.")] = 2,
    compiled: Annotated[bool, typer.Option("--compile", help="Also torch.compile; it needs a C++ compiler.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK)] = False,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="All figures.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", dir_okay=False, help="The tables.")] = None,
    picture_path: Annotated[Path | None, typer.Option("--picture", dir_okay=False, help="The bars, as a PNG.")] = None,
    samples: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The JSON with every sample; compressed as FILE.json.gz.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="JSON, tables and bars, into this folder.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(exists=True, help="An older build to compare with: _engine*.so, or its checkout.")
    ] = None,
    machines: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Print a table of each JSON file in a folder, and stop. With --markdown PAGE, replace the tables of "
            "that page, and draw pictures beside the files.",
        ),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List rows, contenders and probes, and stop.")] = False,
) -> None:
    """Time the engine's operations beside what torch, NumPy and other servers do.

    Each gets its bytes by definition, GB/s, per cent of the limit that was found in the same run,
    and its largest error against float64.

    [bold]Examples[/bold]

      python -m bench

      python -m bench --rows fedbuff -d 1_000_000 -M 32 --threads 1

      python -m bench --rows push,rounds,cached

      python -m bench --rows scaling --picture scaling.png

      python -m bench --rows all --compile --repeats 40 --out results

      python -m bench --against ../afflux-main

      python -m bench --json machines/mine.json

      python -m bench --machines machines

      python -m bench --quick
    """
    from bench import run
    from bench.output.files import Files
    from bench.output.machines import markdown, write
    from bench.rows import ROWS
    from bench.spec.row import Asked

    if machines:
        refuse(context, "--machines", set(context.params) - {"machines", "markdown_path"})
        try:
            if markdown_path:
                write(markdown_path, machines, ROWS)
            else:
                typer.echo(markdown(machines, ROWS), nl=False)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--machines") from None
        return
    files = Files(json_path, markdown_path, picture_path, samples, folder)
    asked = Asked(d, m, threads or ops.default_threads(), quick, sets)
    few = run.QUICK_REPEATS if quick else None
    if against:
        from bench import against as comparison

        refuse(context, "--against", {"compiled", "picture_path"})
        compared = comparison.DEFAULT_ROWS if rows == DEFAULT_ROWS else rows
        comparison.run(against, compared, asked, isa, repeats or few or comparison.REPEATS, files)
    elif list_only:
        run.list_rows(asked)
    else:
        run.run(rows, asked, isa, repeats or few or run.REPEATS, compiled, files)


def refuse(context: typer.Context, option: str, others: set[str]) -> None:
    """Raise an error if the command line has one of the other options, which would have no effect beside `option`."""
    sources = {
        other.opts[0]: context.get_parameter_source(other.name or "")
        for other in context.command.params
        if other.name in others
    }
    if names := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
        raise typer.BadParameter(f"does not go with {', '.join(names)}", param_hint=option)
