"""The calls that the fuzzer makes: each public callable with sound arguments, of which it then spoils some."""

import dataclasses
import inspect
from types import FunctionType

import numpy as np
import torch

import afflux
from afflux import Layout, Rule, Server, ServerOptions, _engine, codecs, ops, plan, rules
from afflux.rules import calibration, optimizers, schedules, staleness, weights
from afflux.rules.presets import dialects
from conftest import bits, ready
from hostile import D

TREE = {"w": np.ones((2, 2), np.float32), "b": np.zeros(2, np.float32), "running_mean": np.zeros(3)}
PARTS = (staleness, weights, schedules, optimizers)


def vector(rng, dtype="float32", size=D):
    return np.array([rng.choice([0.0, 1.0, -2.5, rng.uniform(-1, 1)]) for _ in range(size)], dtype)


def tree(rng):
    return {"w": vector(rng, size=4).reshape(2, 2), "b": vector(rng, size=2), "running_mean": vector(rng, size=3)}


def in_parts(rng, flat):
    """The vector in parts."""
    borders = np.array([0, 1, 1, len(flat)])
    conversion = ops.Conversion("gradient", "update", None, 2.0) if rng.random() < 0.1 else None
    return ops.Parts([flat[:1], flat[1:1], flat[1:]], borders, conversion)


def vectors(rng, count):
    return [in_parts(rng, vector(rng)) if rng.random() < 0.3 else vector(rng) for _ in range(count)]


def some_pass(rng):
    """A round of one of the engine's shapes."""
    count = rng.randrange(4)
    updates = vectors(rng, count)
    combine = ops.Combine(updates, vector(rng, "float64", count), rng.choice([0.0, 1.0]))
    calibrate, step, states, held = None, ops.Step("sgd", 0.5), (), None
    if rng.random() < 0.4:
        kind = rng.choice([ops.CachedDifference, ops.CachedMean])
        codec = rng.choice([None, codecs.affine(4), codecs.rotated(1), codecs.bfloat16])
        size = D if codec is None else codec.row_size(D)
        dtype = "float32" if codec is None else codec.row_dtype
        facts = [ops.RowFacts(7, -1.0, 1.0)] * count if codec is not None and codec.keyed else ()
        rows = [np.zeros(size, dtype) for _ in range(count)]
        calibrate = kind(np.zeros(D), 5, [None] * count, rows, codec, facts)
    if rng.random() < 0.4:
        kind, many = rng.choice(list(_engine.STEP_KINDS.items()))
        step, states = ops.Step(kind, 0.1, 0.9, 0.99, 1e-8), [np.ones(D, np.float32) for _ in range(many)]
    if rng.random() < 0.3:
        held = ops.RuleVectors([vector(rng)], np.ones(1), np.ones((1, 1 + count)))
    params, out = vector(rng), np.zeros(D, np.float32)
    if rng.random() < 0.3:
        params, out = (ops.Parts([v[:1], v[1:1], v[1:]], np.array([0, 1, 1, D])) for v in (params, out))
    return ops.Pass(params, out, combine, calibrate, step, states, held)


def _row(rng, codec):
    return np.zeros(codec.row_size(D), codec.row_dtype)


def _coded(rng):
    codec = rng.choice([codecs.float32, codecs.affine(4), codecs.rotated(2), codecs.affine(1, scope="vector")])
    return {"vector": vector(rng), "row": _row(rng, codec), "codec": codec, "num_threads": 1}


def _conversion(rng):
    return rng.choice(
        [None, ops.Conversion("model", "update", vector(rng)), ops.Conversion("gradient", "update", None, 2.0)]
    )


def _preset(rng):
    name = rng.choice(sorted(rules.RULES))
    return {"name": name, "buffer_size": 2} if name not in ("fedasync", "zenopp") else {"name": name}


def _defaults(function):
    """All options of a preset."""
    options = inspect.signature(function).parameters.values()
    return {option.name: 0.5 if option.default is option.empty else option.default for option in options}


def _make(name=None, **options):
    return rules.make(name, **options)


def _options(rng):
    given = {"num_clients": 5, "max_staleness": 3, "max_slots": 9, "max_versions": 4, "seed": 1, "log": True}
    given |= {"faults": "raise", "dtype": "float32", "slot_dtype": "bfloat16", "flush_after": 10.0, "clip_norms": 2.0}
    given |= {"memory_budget": 10**9, "duplicates": "both", "commit_every": 1, "durability": None, "accumulate": False}
    given |= {"inplace": False, "rows_on": "device", "facts": ("tokens",)}
    return {name: given[name] for name in rng.sample(sorted(given), rng.randrange(5))}


def _parts():
    for module in PARTS:
        for name, cls in vars(module).items():
            if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__:
                yield name, cls


def _part_fields(rng, cls):
    sound = {"lr": 0.1, "law": staleness.Constant(), "rates": {0: 0.1}}
    sound |= {"mode": "inverse", "normalise": "count", "fact": "q", "weigh": weights.Uniform(), "trim": 0.2}
    return {
        field.name: sound.get(field.name, field.default)
        for field in dataclasses.fields(cls)
        if field.init and (field.default is dataclasses.MISSING or rng.random() < 0.5)
    }


def _function(function, **arguments):
    """A call with these arguments; a function among them makes one."""
    return lambda rng: (function, {n: a(rng) if isinstance(a, FunctionType) else a for n, a in arguments.items()})


def _whole(function, arguments):
    return lambda rng: (function, arguments(rng))


def _server(rng):
    given = {"rule": rng.choice([rules.fedbuff(), rules.ca2fl(), rules.fedadam()]), "num_threads": 1, "push_threads": 1}
    given |= {"params": rng.choice([vector(rng), tree(rng)]), "layout": None, "on_step": None, "num_clients": 20}
    return given | _options(rng)


STATELESS = {
    "ops.ingest": _function(
        ops.ingest,
        update=lambda rng: rng.choice([vector(rng), [vector(rng, size=2), vector(rng, size=4)]]),
        slot=vector,
        num_threads=1,
        conversion=_conversion,
    ),
    "ops.gram": _function(ops.gram, vectors=lambda rng: vectors(rng, rng.randrange(4)), num_threads=1),
    "ops.inner": _function(
        ops.inner,
        vectors=lambda rng: vectors(rng, 2),
        weights=np.array([0.5, -1.0]),
        memory=vector,
        shift=0.5,
        memory_weight=1.0,
        num_threads=1,
    ),
    "ops.Parts": _function(
        ops.Parts,
        arrays=lambda rng: [vector(rng), vector(rng, size=1)],
        borders=np.array([0, D, D + 1]),
        conversion=_conversion,
        dtype="float32",
    ),
    "ops.apply": _function(ops.apply, round=some_pass, num_threads=1, done=lambda rng: [], checksums=lambda rng: []),
    "ops.check": _function(ops.check, round=some_pass),
    "ops.row_bytes": _function(ops.row_bytes, size=5, codec="affine-4"),
    "ops.encode": _whole(ops.encode, lambda rng: _coded(rng) | {"facts": ops.RowFacts(3, -1.0, 1.0)}),
    "ops.decode": _whole(ops.decode, _coded),
    "ops.crc32c": _function(ops.crc32c, data=vector, block=8, head=0, num_threads=1),
    "ops.threads": _function(ops.threads, num_threads=1),
    "ops.choose_isa": _function(ops.choose_isa, name="baseline"),
    "ops.choose_policy": _function(ops.choose_policy, text="prefetch=64,stream=0,stages=tiled"),
    "exp": _function(afflux.exp, x=1.0),
    "log": _function(afflux.log, x=1.0),
    "pow": _function(afflux.pow, x=2.0, y=0.5),
    "codecs.affine": _function(codecs.affine, bits=4, scope="block"),
    "codecs.rotated": _function(codecs.rotated, bits=4),
    "codecs.named": _function(codecs.named, codec="float32"),
    "codecs.Codec": _function(codecs.Codec, name="float16"),
    "codecs.Codec.row_bytes": _function(codecs.affine(4).row_bytes, size=9),
    "codecs.Codec.row_size": _function(codecs.float16.row_size, size=9),
    "rules.make": _whole(_make, _preset),
    "rules.make(fedbuff)": _function(
        _make,
        name="fedbuff",
        buffer_size=1,
        staleness={"part": "hinge", "a": 1, "b": 2},
        server_lr={"part": "by_version", "rates": {"0": 1.0}},
        dialect="paper",
    ),
    "rules.from_config": _function(rules.from_config, config=lambda rng: _make(**_preset(rng)).to_config()),
    "rules.register": _function(rules.register, name="some_part", role="step"),
    "cached_difference": _function(
        calibration.cached_difference, codec="affine-4", quantize_direction=True, factor=0.5
    ),
    "Calibrate": _function(
        afflux.Calibrate,
        cached=True,
        direction="mean",
        divide_by="all",
        codec=codecs.affine(4),
        quantize_direction=False,
        factor=1.0,
    ),
    "Rule": _function(
        Rule,
        name="own",
        kind="update",
        buffer_size=1,
        weigh=weights.Uniform(),
        calibrate=calibration.NONE,
        step=optimizers.Sgd(),
    ),
    "Layout.of": _function(Layout.of, tree=tree, select=["w", "b"], roles={"b": "statistic"}),
    "Layout.from_json": _function(Layout.from_json, data=lambda rng: Layout.of(TREE).to_json()),
    "Layout.parts": _function(Layout.of(TREE).parts, tree=tree),
    "Layout.arrays": _function(Layout.of(TREE).arrays, tree=tree),
    "Layout.flatten": _function(Layout.of(TREE).flatten, tree=tree, out=vector, dtype="float32"),
    "Layout.flatten_buffers": _function(Layout.of(TREE).flatten_buffers, tree=tree),
    "Layout.views": _function(Layout.of(TREE).views, flat=vector, buffers=lambda rng: vector(rng, "float64", 3)),
    "Layout.load": _function(
        Layout.of(TREE).load, target=tree, flat=vector, buffers=lambda rng: vector(rng, "float64", 3)
    ),
    "ServerOptions": _whole(ServerOptions, _options),
    "plan": _whole(
        plan,
        lambda rng: {"rule": rules.fedbuff(), "d": 10, "options": None, "store": False, "gpu": False} | _options(rng),
    ),
    "Server": _whole(Server, _server),
    **{f"part {name}": _whole(cls, lambda rng, cls=cls: _part_fields(rng, cls)) for name, cls in _parts()},
    **{
        f"preset {name}": _whole(preset, lambda rng, preset=preset: _defaults(preset))
        for name, preset in rules.RULES.items()
    },
    **{f"dialect {name}": _whole(cls, lambda rng, cls=cls: _defaults(cls)) for name, cls in dialects.DIALECTS.items()},
}


def _serving(rule, params=lambda: np.zeros(D, np.float32), **options):
    return lambda **more: Server(rule, params(), **options, **more)


SERVERS = {
    "fedbuff": _serving(rules.fedbuff(buffer_size=3), max_staleness=5, log=True),
    "record": _serving(rules.fedbuff(buffer_size=3), faults="record", max_versions=3),
    "tree": _serving(rules.fedbuff(buffer_size=2), lambda: dict(TREE)),
    "fedasync": _serving(rules.fedasync(), lambda: np.zeros(D), dtype="float64"),
    "ca2fl": _serving(rules.mf_ca2fl(buffer_size=2), num_clients=6, seed=5),
    "streaming": _serving(rules.fedavg(buffer_size=3), accumulate=True),
    "fadas": _serving(rules.fadas(buffer_size=2), slot_dtype="bfloat16"),
    "wkafl": _serving(
        rules.wkafl(buffer_size=2), lambda: torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    ),
    "gsgm": _serving(rules.gsgm(buffer_size=2), num_clients=4),
    "zenopp": _serving(rules.zenopp(server_lr=0.5)),
    "inplace": _serving(rules.fedbuff(buffer_size=2), inplace=True, max_slots=3),
}


def _started(make, **more):
    return ready(make(**more), np.full(D, 0.1))


#: The same, with the vectors that are set for the rule.
STARTED = {name: lambda make=make, **more: _started(make, **more) for name, make in SERVERS.items()}


def fingerprint(server):
    """All that the next results depend on; without the number of refused pushes, and leases that have ended."""
    state = server.state_dict()
    log = [entry for entry in state["meta"]["log"] or [] if entry[0] != "close" or entry[2] != "expired"]
    counts = {name: count for name, count in state["meta"]["counts"].items() if name != "refused"}
    arrays = {name: bits(array) for name, array in state["arrays"].items()}
    return repr(state["meta"] | {"counts": counts, "log": log}), arrays


def _like_params(rng, server):
    """A vector or tree that the server takes."""
    if server.layout is None:
        return vector(rng, rng.choice(["float32", "float64", "float16"]))
    return server.checkout(0, hold=False).tree() if rng.random() < 0.2 else _tree_of(rng, server.layout)


def _tree_of(rng, layout):
    return layout.views(vector(rng, size=layout.size), vector(rng, "float64", layout.buffers_size))


def _push(rng, server):
    kind = rng.choice([server.rule.kind] * 4 + ["update", "gradient", "model"])
    given = {kind: _like_params(rng, server), "num_examples": rng.choice([1, 1, 5, 0]), "loss": 0.5, "timeout": 0}
    if rng.random() < 0.3 and (tasks := server.tasks):
        given["task"] = rng.choice([rng.choice(tasks), rng.choice(tasks).id])
    else:
        given |= {
            "client": rng.choice([0, 1, 2, "ann"]),
            "version": rng.choice([server.pull(), max(0, server.version - rng.randrange(3))]),
        }
    if rng.random() < 0.5:
        given |= {"client_lr": 0.1, "local_steps": 3}
    if rng.random() < 0.2:
        given["facts"] = {"tokens": 8192.0} if server.options.facts else {}
    if rng.random() < 0.3 and server.layout is not None:
        given["buffers"] = rng.choice(
            [_tree_of(rng, server.layout), vector(rng, "float64", server.layout.buffers_size)]
        )
    return server.push, given


def _out(rng, server):
    return server.pull, {"out": vector(rng) if server.layout is None else _tree_of(rng, server.layout)}


def _task(rng, server):
    task = server.checkout(3, hold=False)
    return task.load, {"target": vector(rng) if server.layout is None else _tree_of(rng, server.layout)}


def _load(rng, server):
    return server.load_state_dict, {"state": server.state_dict()}


def _replace(rng, server):
    given = {"buffer_size": rng.randrange(1, 4)} if server.rule.name not in ("fedasync", "zenopp") else {}
    if server.rule.name == "zenopp":
        given = {"server_lr": 0.5}
    return server.replace_rule, {"rule": rules.make(server.rule.name, **given)}


def _checkout(rng, server):
    return server.checkout, {"client": 5, "lease": rng.choice([None, 600.0]), "hold": rng.choice([True, False])}


def _vector(rng, server):
    return server.set_rule_vector, {"name": "validation", "vector": _like_params(rng, server)}


def _plain(method):
    return lambda rng, server: (getattr(server, method), {})


OF_SERVERS = {
    "push": _push,
    "pull(out)": _out,
    "Task.load": _task,
    "load_state_dict": _load,
    "replace_rule": _replace,
    "checkout": _checkout,
    "set_rule_vector": _vector,
    "flush": _plain("flush"),
    "discard": _plain("discard"),
    "end_pass": _plain("end_pass"),
    "poll": _plain("poll"),
}
#: How often each is drawn.
OFTEN = {"push": 12, "load_state_dict": 3, "pull(out)": 3, "set_rule_vector": 2}
