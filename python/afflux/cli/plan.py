"""`afflux plan`: estimated memory and disk use of a server."""

import json
from dataclasses import asdict
from typing import Annotated, Any

from afflux.cli.common import flag_names_in_errors, parse_rules, report_errors
from afflux.cli.options import typer
from afflux.ops.units import in_bytes

HELP = """Estimate the memory and disk use of a server, part by part. Nothing is run or written.

The memory is that of a server after a push of every client. With --store, params, rows and the rule's vectors are in \
files; the operating system caches them in memory as long as there is room.

\b
Examples:
  afflux plan --rule fedbuff --params 25_000_000
  afflux plan --rule mf_ca2fl:bits=2 --clients 1_000_000 --params 100_000 --store
  afflux plan --rule ca2fl --codec affine-4 --clients 10_000 --params 1_000_000
  afflux plan --rule fedbuff --params 25_000_000 --memory-budget 2_000_000_000
"""
BUDGET = "Most bytes of memory: sets max_slots and max_versions, or is an error, as in `Server(memory_budget=...)`."
#: Arguments of `afflux.plan` and their flags.
FLAGS = {"num_clients": "--clients"} | {
    name: f"--{name.replace('_', '-')}" for name in ("dtype", "slot_dtype", "memory_budget", "max_deferred")
}


def plan(
    rule: Annotated[str, typer.Option(help="A rule with its options, as for `afflux run`.")],
    params: Annotated[int, typer.Option(min=1, help="Parameters of the model, d.")],
    clients: Annotated[int | None, typer.Option(min=1, help="All clients, N; for rules that cache rows.")] = None,
    buffer: Annotated[
        int | None, typer.Option("--buffer", "--buffer-size", help="Arrivals per server step, M; default 10.")
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the rows, for rules that take one.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of params: float32 or float64.")] = "float32",
    slot_dtype: Annotated[str | None, typer.Option(help="Type of arrivals: that of params, or bfloat16.")] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="A running sum in place of the buffer.")] = False,
    store: Annotated[bool, typer.Option("--store", help="With the state on disk.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="With params on a GPU: memory is the GPU's.")] = False,
    rows_on: Annotated[str, typer.Option(help="Where a server on a GPU keeps rows: device or host.")] = "device",
    max_deferred: Annotated[
        int | None, typer.Option(min=0, help="Most arrivals that wait for the next pass (gsgm); default 10 N.")
    ] = None,
    memory_budget: Annotated[int | None, typer.Option(help=BUDGET)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print bytes by part (see HELP)."""
    with report_errors():
        from afflux.aggregation.options import ServerOptions
        from afflux.server import plan as planned

        (spec,) = parse_rules([rule], buffer_size=buffer, codec=codec)
        built = spec.build()
        with flag_names_in_errors(**FLAGS):
            fields: dict[str, Any] = {"num_clients": clients, "dtype": dtype, "slot_dtype": slot_dtype}
            fields |= {"accumulate": streaming, "rows_on": rows_on}
            fields |= {"memory_budget": memory_budget, "max_deferred": max_deferred}
            options = planned.fitted(built, params, ServerOptions(**fields).for_rule(built), store=store, gpu=gpu)
            found = planned.plan(built, params, options, store=store, gpu=gpu)
        limits = {name: getattr(options, name) for name in ("max_slots", "max_versions") if memory_budget is not None}
        if as_json:
            sums = {"memory_bytes": found.memory_bytes, "disk_bytes": found.disk_bytes}
            typer.echo(json.dumps(asdict(found) | sums | limits))
            return
        parts_of = {"memory": found.memory, "at work": found.working, "pinned": found.host, "on disk": found.disk}
        for title, parts in parts_of.items():
            for name, part in parts.items():
                typer.echo(f"{title:<10}{name:<18}{in_bytes(part.size):>8}  {part.what}")
                title = ""
        kept = "".join(f", {name} = {value}" for name, value in limits.items() if value is not None)
        typer.echo(f"{'in all':<10}{'memory':<18}{in_bytes(found.memory_bytes):>8}  at most{kept}")
        if store:
            typer.echo(f"{'':<10}{'on disk':<18}{in_bytes(found.disk_bytes):>8}  when every client has pushed")
