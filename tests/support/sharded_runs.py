"""Servers of every rule and codec, with vectors in shards or in one piece: what they have after some pushes."""

from contextlib import suppress
from itertools import product

import numpy as np

import afflux.store
import presets
from afflux import Server, rules
from conftest import bits, same_state

SUPERBLOCK = 65536
#: Eleven superblocks and a tail: no shard of two, three or five is a subtree.
D = 11 * SUPERBLOCK + 12345
M = 3
SMALL = {"buffer_size": M}
BUFFERED = [name for name in rules.RULES if name not in ("fedasync", *presets.NOT_STREAMED)]
CASES = {
    **{name: (getattr(rules, name)(**SMALL), {}) for name in BUFFERED},
    "fedasync": (rules.fedasync(), {}),
    "gsgm": (rules.gsgm(**SMALL), {"num_clients": 9}),
    "wkafl": (rules.wkafl(**SMALL), {}),
    "wkafl, two stages": (rules.wkafl(**SMALL, clip=5.0, sim_min=0.0, stage_two_version=2, stage_two_clip=0.5), {}),
    "wkafl, aggregate": (rules.wkafl(**SMALL, memory="aggregate", sim_min=-1.0), {}),
    "zenopp": (rules.zenopp(server_lr=0.5), {}),
    "afa_cs": (rules.afa_cs(**SMALL), {"num_clients": 50}),
    **{
        f"ca2fl, {codec}": (rules.ca2fl(**SMALL, codec=codec), {"num_clients": 50})
        for codec in ("float32", "float16", "bfloat16")
    },
    **{
        f"mf_ca2fl, {kind}-{size}": (rules.mf_ca2fl(**SMALL, bits=size, codec=kind), {"num_clients": 50})
        for kind, size in product(("affine", "affine-vector", "rotated"), (8, 4, 2, 1))
        if (kind, size) != ("rotated", 8)
    },
    "a factor of rows": (rules.fedstale(**SMALL, beta=0.3), {"num_clients": 50}),
    "quantized direction": (rules.mf_ca2fl(**SMALL, bits=4, quantize_direction=True), {"num_clients": 50}),
    "accumulate": (rules.fedbuff(**SMALL), {"accumulate": True}),
    "accumulate, fadas": (rules.fadas(**SMALL), {"accumulate": True}),
    "inplace": (rules.fadas(**SMALL), {"inplace": True}),
    "bfloat16 slots": (rules.fedbuff(**SMALL), {"slot_dtype": "bfloat16"}),
    "float64": (rules.fadas(**SMALL), {"dtype": "float64"}),
}


def served(rule, options, data, plane=None, store=None, reopened=lambda server, i: server):
    """What a server has after three rounds and a part of one: its arrivals are of two kinds, and from old versions.

    `reopened` returns the server that goes on before push i.
    """
    server = Server(rule, data[0], log=True, plane=plane, store=store, **options)
    if rule.needs.handed_in:
        server.set_rule_vector(rule.needs.handed_in[0], data[1] * np.float32(0.5))
    reports, pulled = [], server.pull()
    for i in range(3 * rule.buffer_size + 2):
        server = reopened(server, i)
        client = i % 4 if options.get("num_clients") != 9 else i % 9
        vector = data[i % 6] * np.float32(2.0**-12)
        facts = {"num_examples": 1 + i % 3, "loss": 1.0 / (i + 1)}
        if i % 3 == 1:
            base = pulled if i % 2 or options.get("inplace") else server.pull()
            model = base.params + vector
            rest = {"client_lr": 0.1, "local_steps": 2} if rule.kind == "gradient" else {}
            receipt = server.push(client=client, version=base, model=model, **rest, **facts)
        else:
            receipt = server.push(client=client, version=max(0, server.version - i % 2), **{rule.kind: vector}, **facts)
        reports.append(receipt.report)
    state, log = server.state_dict(), server.log
    if store is not None:
        if (rows := server.rows) is not None:  # a store's are not in its state
            state["meta"]["row_ids"] = rows.client_ids
            state["arrays"] |= {"rows": np.array([*rows.values()]), "sum": rows.sum}
        server.close()
    return state, [facts_of(report) for report in reports if report], log


def check_stored_bits(case, new_plane, data, path):
    """A store of shards has the bits of one server: closed amid a buffer, and opened once after the last commit alone.

    Its only index is that of the whole.
    """
    rule, options = CASES[case]
    expected, *of_one = served(rule, options, data)

    def reopened(server, i):
        if i not in (2, 7):
            return server
        if i == 7:
            server.checkpoint()
        server.close(checkpoint=i == 2)
        return Server.open(path, plane=new_plane())

    state, *of_shards = served(rule, options, data, new_plane(), path, reopened)
    assert of_shards == of_one
    same_state(state, expected)
    assert afflux.store.check(path).sound
    assert [file.parent for file in path.rglob("*.sqlite")] == [path]


def facts_of(report):
    """All of a report but its time, with the bits of its numbers."""
    facts = {name: getattr(report, name) for name in report.__struct_fields__ if name != "seconds"}
    return {name: bits(fact) if isinstance(fact, np.ndarray) else fact for name, fact in facts.items()}


class Interrupts:
    """Raises KeyboardInterrupt once: before call number `at` of these methods, (class, name), or after it.

    The first call after `calls` was set to 0 is number 0.
    """

    def __init__(self, patch, methods, at, after):
        self.calls, self.at, self.after, self.names = -(10**9), at, after, set()
        for owner, name in methods:
            patch.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, method):
        def call(*arguments, **options):
            number, self.calls = self.calls, self.calls + 1
            self.names |= {method.__name__} if number >= 0 else set()
            if number == self.at and not self.after:
                raise KeyboardInterrupt
            result = method(*arguments, **options)
            if number == self.at and self.after:
                raise KeyboardInterrupt
            return result

        return call

    def stop(self):
        """Raise nothing from now on; return the number of calls so far."""
        calls, self.calls = self.calls, -(10**9)
        return calls


def repeated(call):
    """Call until the call returns."""
    while True:
        with suppress(KeyboardInterrupt):
            return call()


def contents_of(server):
    """All that a server keeps."""
    state, rows = server.state_dict(), server.rows
    del state["meta"]["counts"]["refused"]
    for name in ("rows", "sum"):
        state["arrays"].pop(name, None)
    clients = [] if rows is None else rows.client_ids
    own = {client: bytes(rows.encoded(client)) for client in clients} | {"": None if rows is None else bits(rows.sum)}
    return state["meta"] | {"row_ids": []}, {name: bits(array) for name, array in state["arrays"].items()}, own
