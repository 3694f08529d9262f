"""The grammar of aggregation rules, and the presets: the papers' rules as compositions of parts."""

from afflux.rules import presets
from afflux.rules.presets import *  # noqa: F403

__all__ = list(presets.__all__)
