"""afflux: the server side of asynchronous federated learning as a fast, exact, embeddable engine."""

from afflux import _engine_library  # noqa: F401, chooses the library of `_engine`, before any import of that

# isort: split
from afflux import ops, rules
from afflux._engine import __version__
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.reports import (
    Closed,
    Cut,
    Fault,
    Handed,
    Join,
    NewParams,
    NoiseNonce,
    Opened,
    Pulled,
    Receipt,
    Replaced,
    Report,
)
from afflux.arrays.layout import Layout
from afflux.ops import codecs
from afflux.ops.errors import AffluxError, BlockedError, BusyError, PlaneError, StoreError, UnavailableError
from afflux.ops.exact import exp, log, pow
from afflux.rules.rule import Arrivals, Calibrate, Needs, Rule, Weights
from afflux.server.aggregate import aggregate
from afflux.server.checkout import Task
from afflux.server.plan import Plan, plan
from afflux.server.replay import replay
from afflux.server.server import Server

__all__ = [
    "AffluxError",
    "Arrivals",
    "BlockedError",
    "BusyError",
    "Calibrate",
    "Closed",
    "Cut",
    "Fault",
    "Handed",
    "Join",
    "Layout",
    "Needs",
    "NewParams",
    "NoiseNonce",
    "Opened",
    "Plan",
    "PlaneError",
    "Pulled",
    "Receipt",
    "Replaced",
    "Report",
    "Rule",
    "Server",
    "ServerOptions",
    "StoreError",
    "Task",
    "UnavailableError",
    "Weights",
    "__version__",
    "aggregate",
    "codecs",
    "exp",
    "log",
    "ops",
    "plan",
    "pow",
    "replay",
    "rules",
]
