"""The rows through the adapters, one for each framework."""

from afflux.bench.rows.adapters.flower import FLOWER_ADAPTER

ADAPTERS = [FLOWER_ADAPTER]
