"""The tasks of a server: which client trains from which version. `Admission` has the open ones.

The params of these versions are held for conversions from and to models, up to a limit: a step never fails because of
a task.
"""

import os
import weakref
from collections.abc import Iterable, Mapping
from math import inf
from time import time

from afflux._engine import clock
from afflux.aggregation.admission import Admission
from afflux.aggregation.reports import Opened, Pulled
from afflux.rules.rule import ClientId


def new_task(client_id: ClientId, version: int, lease: float | None, *, hold: bool) -> tuple[Opened, float]:
    """Return a task that is not open yet, with a random id, and its deadline by `clock`."""
    until = None if lease is None else time() + lease
    opened = Opened(os.urandom(16).hex(), client_id, version, hold, until, lease)
    return opened, inf if lease is None else clock() + lease


def restore(admission: Admission, opened: Iterable[Opened], bases: Mapping[int, Pulled]) -> None:
    """Open the tasks of a store, with the bases that the store has kept.

    The system's clock may have been set back: at most the whole lease is left.
    """
    now = time()
    for entry in opened:
        seconds = inf if entry.until is None else min(entry.until - now, inf if entry.lease is None else entry.lease)
        base = bases.get(entry.version)
        admission.restore_task(entry, entry.task, entry.version, entry.hold, clock() + seconds, base)


def release_one(admission: Admission) -> bool:
    """Release the oldest version that only tasks hold, so that its memory is free. Return False if there is none."""
    newest = admission.version
    for version in sorted(admission.bases()):
        if version == newest:
            break  # the server itself holds it
        base = admission.take_base(version)
        alive, buffers = weakref.ref(base.params), base.buffers
        del base
        params = alive()
        admission.put_back_base(version, None if params is None else Pulled(params, version, buffers))
        if params is None:
            return True
        del params  # another reference keeps the memory
    return False
