"""The rows of the adapters, one for each framework."""

from afflux.bench.rows.adapters.appfl import APPFL_ADAPTER
from afflux.bench.rows.adapters.flgo import FLGO_ADAPTER
from afflux.bench.rows.adapters.flower import FLOWER_ADAPTER
from afflux.bench.rows.adapters.nvflare import NVFLARE_ADAPTER

ADAPTERS = [FLOWER_ADAPTER, NVFLARE_ADAPTER, APPFL_ADAPTER, FLGO_ADAPTER]
