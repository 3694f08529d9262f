"""afflux: the server side of asynchronous federated learning as a fast, exact, embeddable engine."""

from afflux import ops, rules
from afflux._engine import __version__
from afflux.errors import AffluxError, UnavailableError
from afflux.layout import Layout
from afflux.rule import Arrivals, Calibrate, Rule
from afflux.server import Pulled, Receipt, Report, Server

__all__ = [
    "AffluxError",
    "Arrivals",
    "Calibrate",
    "Layout",
    "Pulled",
    "Receipt",
    "Report",
    "Rule",
    "Server",
    "UnavailableError",
    "__version__",
    "ops",
    "rules",
]
