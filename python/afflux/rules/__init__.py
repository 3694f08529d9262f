"""The grammar of aggregation rules, and the presets: the papers' rules as compositions of parts."""

from afflux.rules import presets
from afflux.rules.presets import *  # noqa: F403
from afflux.rules.registry import register
from afflux.rules.serialization import from_config, make

__all__ = [*presets.__all__, "from_config", "make", "register"]
