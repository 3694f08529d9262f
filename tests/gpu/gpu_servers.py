"""The suites of `Server`, with every server on a GPU, or on the emulated one: a plugin of pytest.

    AFFLUX_ARRAYS=cupy python -m pytest -p gpu_servers tests/rules/test_rules.py
    AFFLUX_EMULATED=path/of/_engine.so AFFLUX_ARRAYS=cupy python -m pytest -p gpu_servers tests/rules/test_rules.py
    AFFLUX_EMULATED=path/of/_engine.so AFFLUX_ARRAYS=cupy python tests/gpu/gpu_servers.py    prints the rules' digests

Params go there as arrays of AFFLUX_ARRAYS (cupy or torch; emulated: fake_cupy.py, fake_torch.py), and so does every
second vector that is pushed; the others stay on the host. What a server shows comes back as NumPy's, for tests that
know no other.
"""

import os

if "AFFLUX_EMULATED" in os.environ:  # before the package
    import emulated

    emulated.moving = False

from dataclasses import asdict
from itertools import count

import numpy as np
import pytest
from msgspec import structs

import afflux
import crashes
import server_plugins
from afflux.aggregation.options import ServerOptions
from afflux.arrays.interop import on_host
from device import libraries

ARRAYS = os.environ["AFFLUX_ARRAYS"]
ROWS_ON = os.environ.get("AFFLUX_ROWS_ON", "device")
moved = libraries()[ARRAYS]
#: What these tests look at, arrays of other libraries have not.
OF_NUMPY = (
    "test_versions_nobody_holds_are_used_again",
    "test_a_version_outlives_its_server_and_stays_read_only",
    "test_a_version_that_cannot_be_committed_is_not_told",
    "test_vectors_that_are_read_in_place_have_the_bits_of_slots",
    "test_rule_vectors_have_one_spare",
    "test_slots_may_be_arrays_without_a_truth_value",
)


class Shown(np.ndarray):
    """A read-only copy, which holds what it was made of."""


def shown(vector):
    copy = on_host(vector, copy=True).view(Shown)
    copy.held = vector
    copy.flags.writeable = False
    return copy


def held_of(pulled):
    """The server's own object for an object that a caller has got."""
    return (
        structs.replace(pulled, params=pulled.params.held)
        if hasattr(getattr(pulled, "params", None), "held")
        else pulled
    )


def on_gpu(tree):
    """With arrays of float32 and float64 on the device."""
    if isinstance(tree, dict):
        return {name: on_gpu(value) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(on_gpu, tree))
    sound = isinstance(tree, np.ndarray) and tree.dtype in (np.float32, np.float64) and tree.flags.aligned
    return moved(tree) if sound and tree.flags.c_contiguous else tree


class GpuServer(afflux.Server):
    def __init__(self, rule, params, options=None, **arguments):
        self._pushes, self._process = count(), os.getpid()
        asked = asdict(options or ServerOptions()) | arguments
        if ARRAYS == "cupy" and asked["slot_dtype"] == "bfloat16":
            pytest.skip("CuPy has no bfloat16")
        opened = options is not None  # by `open`, whose store has the rows
        cached = isinstance(rule, afflux.Rule) and rule.calibrate.cached
        rows = {"rows_on": ROWS_ON} if cached and not (opened or "store" in arguments) else {}
        host = arguments.get("plane")  # which has its own arrays
        super().__init__(rule, params if host else on_gpu(params), options, **rows, **arguments)

    @classmethod
    def open(cls, path, rule=None, **options):
        return super().open(path, rule, like=moved(np.zeros(1)), **options)

    def checkpoint(self, notes=None, *, keep=()):
        return super().checkpoint(notes, keep=[held_of(one) for one in keep] if isinstance(keep, list) else keep)

    @property
    def retained_versions(self):
        return {version: structs.replace(held, params=shown(held.params)) for version, held in self._kept.items()}

    @retained_versions.setter
    def retained_versions(self, versions):
        self._kept = versions

    @property
    def elsewhere(self):
        return self._aggregator.plane.gpu is not None

    def push(self, **facts):
        moves = self._process == os.getpid()  # CUDA does not survive a fork
        if self.elsewhere and moves and next(self._pushes) % 2 == 0:
            facts |= {kind: on_gpu(facts[kind]) for kind in ("update", "gradient", "model") if kind in facts}
        return super().push(**facts)

    def pull(self, *, out=None):
        pulled = super().pull() if out is None else super().pull(out=out)
        return structs.replace(pulled, params=shown(pulled.params)) if self.elsewhere and out is None else pulled

    @property
    def rule_vectors(self):
        return {name: on_host(vector) for name, vector in super().rule_vectors.items()}

    @property
    def rows(self):
        rows = super().rows
        return ShownRows(rows) if self.elsewhere and rows is not None else rows


class ShownRows:
    """A server's cached rows, with NumPy's arrays."""

    def __init__(self, rows):
        self._rows = rows

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def __len__(self):
        return len(self._rows)

    def __contains__(self, client_id):
        return client_id in self._rows

    @property
    def sum(self):
        return on_host(self._rows.sum)

    def row(self, client_id):
        row = self._rows.row(client_id)
        return None if row is None else on_host(row)

    def encoded(self, client_id):
        row = self._rows.encoded(client_id)
        return None if row is None else on_host(row)

    def values(self):
        return [on_host(row) for row in self._rows.values()]


def in_child(body):
    pytest.skip("a GPU, and torch's threads, do not survive a fork")


server_plugins.use(GpuServer)
crashes.in_child = in_child
pytest_collection_modifyitems = server_plugins.skipping(OF_NUMPY, "of NumPy's arrays")


if __name__ == "__main__":
    server_plugins.print_digests()
