"""`afflux plan`: what a server will take."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from afflux.cli.common import friendly, specs_of
from afflux.units import in_bytes

HELP = """Print what a server will take, in memory and on disk, part by part. Nothing is run or written.

Memory is that of a server whose clients have all pushed. With --store, params, rows and the rule's vectors lie in \
files; the system keeps them in memory as long as it has room.

[bold]Examples[/bold]

  afflux plan --rule fedbuff --params 25_000_000

  afflux plan --rule mf_ca2fl:bits=2 --clients 1_000_000 --params 100_000 --buffer 32 --store

  afflux plan --rule ca2fl --codec affine-4 --clients 10_000 --params 1_000_000 --json
"""


def plan(
    rule: Annotated[str, typer.Option(help="A rule with its options, as for `afflux run`.")],
    params: Annotated[int, typer.Option(min=0, help="Parameters of the model, d.")],
    clients: Annotated[int | None, typer.Option(min=1, help="All clients, N; for rules that cache rows.")] = None,
    buffer: Annotated[int | None, typer.Option(help="Arrivals per server step, M; default 10.")] = None,
    codec: Annotated[str | None, typer.Option(help="Of the rows, for rules that take one.")] = None,
    dtype: Annotated[str, typer.Option(help="Of params: float32 or float64.")] = "float32",
    slot_dtype: Annotated[str | None, typer.Option(help="Of arrivals: that of params, or bfloat16.")] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="One sum in place of the buffer.")] = False,
    store: Annotated[bool, typer.Option("--store", help="With the state on disk.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="With params on a GPU: memory is the GPU's.")] = False,
    rows_on: Annotated[str, typer.Option(help="Where a server on a GPU keeps rows: device or host.")] = "device",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print bytes by part (see HELP)."""
    with friendly():
        from afflux import plan as planned

        (spec,) = specs_of([rule], buffer_size=buffer, codec=codec)
        found = planned.plan(
            spec.build(),
            params,
            num_clients=clients,
            dtype=dtype,
            slot_dtype=slot_dtype,
            memory="streaming" if streaming else "buffered",
            store=store,
            gpu=gpu,
            rows_on=rows_on,
        )
        if as_json:
            typer.echo(json.dumps(asdict(found) | {"memory_bytes": found.memory_bytes, "disk_bytes": found.disk_bytes}))
            return
        parts_of = {"memory": found.memory, "at work": found.working, "pinned": found.host, "on disk": found.disk}
        for title, parts in parts_of.items():
            for name, part in parts.items():
                typer.echo(f"{title:<10}{name:<18}{in_bytes(part.size):>8}  {part.what}")
                title = ""
        typer.echo(f"{'in all':<10}{'memory':<18}{in_bytes(found.memory_bytes):>8}  at most")
        if store:
            typer.echo(f"{'':<10}{'on disk':<18}{in_bytes(found.disk_bytes):>8}  when every client has pushed")
