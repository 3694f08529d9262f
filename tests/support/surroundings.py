"""Blocks of a test in other surroundings: memory is traced, subnormal numbers are flushed, no garbage is collected."""

import gc
import tracemalloc
from contextlib import contextmanager

import pytest


@contextmanager
def traced_memory_below(limit):
    """At the peak of the block Python and NumPy have allocated fewer bytes than this."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@contextmanager
def flushed_subnormals(flush=True):
    """This thread computes in the mode of torch in which subnormal numbers are 0; skips where the CPU has none."""
    import torch

    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def references_alone():
    """Only references count: the garbage collector does not run."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
