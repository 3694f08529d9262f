"""Tasks of Ray that train and evaluate, in the place of worker processes: messages carry params and updates."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from afflux.distributed import RayPlane
from afflux.distributed.connection import START_TIMEOUT, await_start
from afflux.ops.errors import UnavailableError
from afflux.rules.files import loaded_digests, parents_digests

_key = b""  #: of the pool whose tasks this process has run last


def cpus() -> int:
    """Return the number of CPUs of the cluster of Ray, which is started if this process is connected to none."""
    RayPlane.connect()
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


class RayPool:
    """The interface of `ProcessPool`, for the functions of workers.py: their third argument is a place in `memory`.

    Raises:
        UnavailableError: no CPU of the cluster has become free for a task within a minute.
    """

    def __init__(self, memory: Mapping[str, np.ndarray], use: Callable[..., None], content: bytes) -> None:
        import ray

        self._ray, self._memory, self._use = ray, memory, use
        self._task = ray.remote(_run).options(num_cpus=1)
        first = ray.remote(lambda: None).options(num_cpus=1).remote()
        try:
            await_start("[run] worker", [first], [{"num_cpus": 1}], START_TIMEOUT)
        except UnavailableError:
            ray.cancel(first)
            raise
        self._setup = os.urandom(16), [ray.put((content, loaded_digests()))]
        self._running: dict[Future[Any], Any] = {}

    def job(self, reported: Callable[..., Any], function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Call a function in a task."""
        config, seed, place, *rest = arguments
        rows, job = {name: array[place] for name, array in self._memory.items()}, Future[Any]()
        call = self._use, reported, function, config, seed, *rest
        reply = self._running[job] = self._task.remote(*self._setup, rows, *call)

        def end(ended: "Future[Any]") -> None:
            self._running.pop(job, None)
            if (error := ended.exception()) is None:
                result, rows = ended.result()
                for name, row in rows.items():
                    self._memory[name][place] = row
                job.set_result(result)
            elif isinstance(error, self._ray.exceptions.RayTaskError):
                job.set_exception(getattr(error, "cause", error))
            else:
                job.set_exception(BrokenProcessPool(str(error)))

        reply.future().add_done_callback(end)
        return job

    def stop(self) -> None:
        """End the tasks."""
        for reply in [*self._running.values()]:
            self._ray.cancel(reply, force=True)


def _run(key: bytes, setup: list[Any], rows: Mapping[str, np.ndarray], use: Any, *call: Any) -> Any:
    """Call a function of a worker, whose only place has these rows; return its result and the rows."""
    global _key
    memory, content = {name: np.array(row)[None] for name, row in rows.items()}, None
    if key != _key:
        import ray

        content, digests = ray.get(setup[0])
        parents_digests.update(digests)
    use(memory, content)
    _key = key
    reported, function, config, seed, *rest = call
    result = reported(function, config, seed, 0, *rest)
    return result, {name: array[0] for name, array in memory.items()}
