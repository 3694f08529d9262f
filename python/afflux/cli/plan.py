"""`afflux plan`: estimated memory and disk use of a server."""

import argparse
import json
from argparse import Namespace
from dataclasses import asdict

from afflux.cli.common import Parser, add_command, flag_names_in_errors, parse_rules, positive_integer
from afflux.ops.units import in_bytes

HELP = """Estimate the memory and disk use of a server, part by part. Nothing is run or written.

The memory is for a server after a push of every client. With --store,
params, rows and the rule's vectors are in files; the operating system caches
them in memory as long as there is room.

Examples:
  afflux plan --rule fedbuff --params 25_000_000
  afflux plan --rule mf_ca2fl:bits=2 --clients 1_000_000 --params 100_000 --store
  afflux plan --rule ca2fl --codec affine-4 --clients 10_000 --params 1_000_000
  afflux plan --rule fedbuff --params 25_000_000 --memory-budget 2_000_000_000
"""
BUDGET = "Most bytes of memory: sets max_slots and max_versions, or is an error, as in `Server(memory_budget=...)`."
#: Arguments of `afflux.plan` and their flags.
FLAGS = {"num_clients": "--clients"} | {
    name: f"--{name.replace('_', '-')}" for name in ("dtype", "slot_dtype", "memory_budget")
}


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the command."""
    parser = add_command(commands, plan, HELP)
    parser.option("--rule", required=True, help="A rule with its options, as for `afflux run`.")
    parser.option("--params", type=positive_integer, required=True, help="Parameters of the model, d.")
    parser.option("--clients", type=positive_integer, help="All clients, N; for rules that cache rows.")
    parser.option("--buffer", "--buffer-size", type=int, help="Arrivals per server step, M; default 10.")
    parser.option("--codec", help="Codec of the rows, for rules that take one.")
    parser.option("--dtype", default="float32", help="Type of params: float32 or float64.")
    parser.option("--slot-dtype", help="Type of arrivals: that of params, or bfloat16.")
    parser.flag("--streaming", help="A running sum in place of the buffer.")
    parser.flag("--store", help="With the state on disk.")
    parser.flag("--gpu", help="With params on a GPU: memory is the GPU's.")
    parser.option("--rows-on", default="device", help="Where a server on a GPU keeps rows: device or host.")
    parser.option("--memory-budget", type=int, help=BUDGET)
    parser.flag("--json", help="Print JSON.")


def plan(arguments: Namespace) -> None:
    """Print bytes by part (see HELP)."""
    from afflux.aggregation.options import ServerOptions
    from afflux.server import plan as planned

    (spec,) = parse_rules([arguments.rule], buffer_size=arguments.buffer, codec=arguments.codec)
    built = spec.build()
    with flag_names_in_errors(**FLAGS):
        same = "dtype", "slot_dtype", "rows_on", "memory_budget"
        fields = {name: getattr(arguments, name) for name in same}
        fields |= {"num_clients": arguments.clients, "accumulate": arguments.streaming}
        places = {"store": arguments.store, "gpu": arguments.gpu}
        options = planned.fitted(built, arguments.params, ServerOptions(**fields).for_rule(built), **places)
        sizes = planned.plan(built, arguments.params, options, **places)
    names = () if arguments.memory_budget is None else ("max_slots", "max_versions")
    limits = {name: getattr(options, name) for name in names}
    if arguments.json:
        sums = {"memory_bytes": sizes.memory_bytes, "disk_bytes": sizes.disk_bytes}
        print(json.dumps(asdict(sizes) | sums | limits))
        return
    parts_of = {"memory": sizes.memory, "at work": sizes.working, "pinned": sizes.host, "on disk": sizes.disk}
    for title, parts in parts_of.items():
        for name, part in parts.items():
            print(f"{title:<10}{name:<18}{in_bytes(part.size):>8}  {part.what}")
            title = ""
    bounds = "".join(f", {name} = {value}" for name, value in limits.items() if value is not None)
    print(f"{'in all':<10}{'memory':<18}{in_bytes(sizes.memory_bytes):>8}  at most{bounds}")
    if arguments.store:
        print(f"{'':<10}{'on disk':<18}{in_bytes(sizes.disk_bytes):>8}  when every client has pushed")
