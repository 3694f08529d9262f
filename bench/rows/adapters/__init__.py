"""The rows of the adapters, one for each framework."""

from bench.rows.adapters.appfl import APPFL_ADAPTER
from bench.rows.adapters.flgo import FLGO_ADAPTER
from bench.rows.adapters.flower import FLOWER_ADAPTER
from bench.rows.adapters.nvflare import NVFLARE_ADAPTER

ADAPTERS = [FLOWER_ADAPTER, NVFLARE_ADAPTER, APPFL_ADAPTER, FLGO_ADAPTER]
