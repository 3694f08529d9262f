"""For `aggregator_path` of APPFL's configuration."""

from afflux.integrations.appfl import AffluxAggregator

__all__ = ["AffluxAggregator"]
