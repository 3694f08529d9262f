"""One server round of every preset, from the papers, in plain float64 NumPy: a file for each file of afflux's presets.

Each file has dicts, of which all but ROUNDS may be absent; here they are those of all files together:

ROUNDS     {name: round}; papers.py says what a round takes and gives
VECTORS    {name: (vector, ...)}: the vectors (d,) that the rule keeps, zeros at first (v and v_hat: see `start`); of a
           variant that keeps others {id: ...}
SCALARS    {name: {number that it keeps: first value}}
VARIANTS   {id: (name, options in the oracle's words)}, beside every preset without options. No options of a round:
           initial_v, which is the server's first state, and duplicates, what the server does with a client's second
           arrival in a buffer
FIRES      {id of a variant: what must both happen and not happen in a trace}; "accepted" and "stepped", too
BOUNDS     {name: f(before, buffer, after, decisions, dv, options) -> {vector: bound before it is rounded}}, of vectors
           that only this rule keeps, and of params if they do not move by server_lr * direction
WEIGHTS    {name: f(before, buffer, decisions, options) -> the weights' relative error}, if a law does not make them
DECISIONS  {name: f(before, buffer, decisions, options) -> {what is decided: error of the quantity that decides}}
NOT_STREAMED  {name, or id of a variant: why the weights are not known on arrival}
"""

from importlib import import_module
from pkgutil import iter_modules

import numpy as np

from papers import f64

_FILES = [import_module(f"presets.{module.name}") for module in iter_modules(__path__)]


def _all(what):
    return {key: value for file in _FILES for key, value in getattr(file, what, {}).items()}


ROUNDS, VECTORS, SCALARS, VARIANTS, FIRES = map(_all, ("ROUNDS", "VECTORS", "SCALARS", "VARIANTS", "FIRES"))
BOUNDS, WEIGHTS, DECISIONS, NOT_STREAMED = map(_all, ("BOUNDS", "WEIGHTS", "DECISIONS", "NOT_STREAMED"))


def start(name, params, num_clients=None, initial_v=0.0):
    """The state before the first round."""
    params = f64(params)
    state = {"params": params, "version": 0, "num_clients": num_clients, "rows": {}, "entered": 0}
    for vector in VECTORS.get(name, ()):
        state[vector] = np.full_like(params, initial_v if vector in ("v", "v_hat") else 0.0)
    return state | SCALARS.get(name, {})
