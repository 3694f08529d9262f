"""The presets: the papers' rules as compositions of parts, one paper a file."""

from collections.abc import Callable

from afflux.rule import Rule
from afflux.rules.ca2fl import ca2fl
from afflux.rules.fedasync import fedasync
from afflux.rules.fedavg import fedavg
from afflux.rules.fedbuff import fedbuff

#: Every preset by name; the contract tests walk it. Each can be called without arguments.
RULES: dict[str, Callable[..., Rule]] = {
    "fedavg": fedavg,
    "fedbuff": fedbuff,
    "fedasync": fedasync,
    "ca2fl": ca2fl,
}

__all__ = ["RULES", "ca2fl", "fedasync", "fedavg", "fedbuff"]
