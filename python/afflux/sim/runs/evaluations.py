"""The evaluations of a run, in order. If there are worker processes, these evaluate in parallel with training."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

from afflux.server.server import Server
from afflux.sim.results.run_result import Evaluation
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.workers import Workers


class _Open(NamedTuple):
    arrivals: int
    version: int
    time: float
    found: "Future[tuple[float, float]]"


class Evaluations:
    """Evaluations that were started and are not yet in the history."""

    def __init__(self, setup: SimulationSetup, server: Server) -> None:
        self.workers: Workers | None = None
        self._setup = setup
        self._server = server
        self._open: deque[_Open] = deque()

    def start(self, arrivals: int, time: float, last: Evaluation | None = None) -> None:
        """Evaluate the current model; `last` is the newest evaluation in the history.

        Raises:
            ConfigError: as `Trainer.evaluate`.
            WorkerError: a worker has failed.
        """
        newest = self._open[-1].version if self._open else last and last.version
        version = self._server.version
        if version != newest:
            found = self._found()
        elif self._open:
            found = self._open[-1].found
        else:
            assert last is not None
            found = _known(last.accuracy, last.loss)
        self._open.append(_Open(arrivals, version, time, found))

    def _found(self) -> "Future[tuple[float, float]]":
        model = self._server.pull()
        if self.workers is not None:
            return self.workers.evaluate(model)
        buffers = None if self._setup.model.initial_buffers is None else model.buffers
        return _known(*self._setup.trainer.evaluate(model.params, buffers))

    def ended(self, wait: bool) -> Iterator[Evaluation]:
        """Yield the evaluations that have ended since the last call, in their order.

        With `wait`, wait for all evaluations that were started.

        Raises:
            ConfigError: as `Trainer.evaluate`.
            WorkerError: a worker has failed.
        """
        while self._open and (wait or self._open[0].found.done()):
            arrivals, version, time, found = self._open[0]
            accuracy, loss = found.result()
            self._open.popleft()
            yield Evaluation(arrivals, version, time, accuracy, loss)


def _known(accuracy: float, loss: float) -> "Future[tuple[float, float]]":
    found: Future[tuple[float, float]] = Future()
    found.set_result((accuracy, loss))
    return found
