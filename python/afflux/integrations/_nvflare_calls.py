"""Calls of Collab's clients, and their results."""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, MetaKey
from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted
from nvflare.collab.api.proxy_list import ProxyList

from afflux import Task
from afflux.aggregation.reports import Pulled
from afflux.integrations._core import Metrics, Trained, TrainingRun
from afflux.integrations._loop import Reply, Transport
from afflux.integrations._reading import MAPPINGS, bounded, finite_number, means_of
from afflux.integrations._versions import OncePerVersion
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId

Model = Mapping[str, Any]


class CollabTransport(Transport):
    """The clients of a Collab job.

    Args:
        app: an AsyncServer, whose module imports this one.
        sites: proxies of the clients, by name.
        training: the server and the clients of the run.
    """

    name = "nvflare"

    def __init__(self, app: Any, sites: Mapping[Any, Any], training: TrainingRun) -> None:
        self.logger = app.logger
        self._app, self._training = app, training
        self._sites = dict[ClientId, Any](sites)
        self._model_of = OncePerVersion(lambda version: _for_calls(training.versions.copied(version)))
        self._open: dict[str, Any] = {}  # results of the calls that have not ended, by key
        self._came: deque[tuple[str, Any]] = deque()
        self._something_came = Event()

    def require_function(self) -> None:
        """Check that a client publishes the function `call`, with the arguments that the server passes.

        Raises:
            AffluxError: none does; the message has the reason of one.
        """
        reason = None
        for site in self._sites.values():
            try:
                site.adjust_func_args(self._app.call, ({}, 0), self._app.call_args)
                return
            except (RuntimeError, TypeError) as error:
                reason = error
        if reason is not None:
            raise AffluxError(f"[AsyncServer] call={self._app.call!r} cannot be called at any client: {reason}")

    def clients(self) -> Iterable[ClientId]:
        """Return the names of the sites; NVFlare fixes them when the job starts."""
        return list(self._sites)

    def send(self, address: ClientId, task: Task) -> str | None:
        """Call the client's function, without waiting."""
        site, timeout = ProxyList([self._sites[address]]), self._training.timeout
        try:
            publisher = site(blocking=False, timeout=timeout, process_resp_cb=self._take, key=task.id)
            call = getattr(publisher, self._app.call)
            self._open[task.id] = call(self._model_of(task.pulled), task.version, **self._app.call_args)
        except (RuntimeError, TypeError) as error:  # the client publishes no such function, or one of other arguments
            self.logger.warning("Client %s cannot be called: %s", address, error)
            return None
        return task.id

    def _take(self, call: Any, result: Any, key: str) -> None:
        """Store the result of a client; NVFlare calls this method in its own thread."""
        self._came.append((key, result))
        self._something_came.set()

    def replies(self, keys: list[str]) -> list[tuple[str, Reply]]:
        """Return the results of clients, and the calls that failed."""
        if collab.is_aborted:
            raise RunAborted("the job was aborted")
        self._something_came.clear()
        found: list[tuple[str, Reply]] = []
        while self._came:
            key, result = self._came.popleft()
            self._open.pop(key, None)
            found.append((key, partial(self._read, result)))
        for key in [key for key, results in self._open.items() if results.failures]:  # NVFlare calls no function
            found.append((key, str(next(iter(self._open.pop(key).failures.values())))))
        return found

    def wait(self, seconds: float) -> None:
        """Wait until a client has returned a result."""
        self._something_came.wait(seconds)

    def _read(self, result: Any) -> Trained:
        app, kind, meta = self._app, None, {}
        params, found = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, {})
        if isinstance(result, FLModel):
            params, found, kind, meta = result.params, result.metrics or {}, result.params_type, result.meta
        if not (isinstance(params, MAPPINGS) and isinstance(found, MAPPINGS)):
            kinds = f"{type(result).__name__} of {type(params).__name__} and {type(found).__name__}"
            raise ValueError(f"the reply is a {kinds}, must be params by name, a pair (params, metrics) or an FLModel")
        if kind is not None and kind != app.params_type:
            raise ValueError(f"the FLModel is {kind}, params_type says {app.params_type}")
        count = found.get(app.weight_key, meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND))
        loss, rate, steps = found.get(app.loss_key), found.get("client_lr"), found.get("local_steps")
        metrics, delta = _numbers(found) or None, app.params_type == "DIFF"
        return Trained(params, count, loss, rate, steps, metrics, facts=found, delta=delta)

    def step_done(self, step: int, metrics: list[Metrics]) -> object:
        """Send the means of the clients' metrics."""
        means = means_of(metrics)
        self._app.publish_metrics("train", step, means)
        return {name: f"{mean:.4g}" for name, mean in means.items()}

    def evaluate(self, newest: Pulled) -> None:
        """Fire the event of a new version, and evaluate it on the server."""
        step, model = newest.version, self._training.versions.copied(newest)
        self._app.publish_version(step, model)
        result = self._app.evaluate(step, model)
        if not (result is None or isinstance(result, Mapping)):
            raise AffluxError(f"[AsyncServer] evaluate returned {brief(result)}, must be numbers by name, or None")
        if metrics := _numbers(result or {}):
            self.logger.info("Evaluation of version %d: %s", step, metrics)
            self._app.publish_metrics("evaluate", step, metrics)


def _for_calls(model: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a version, which all its calls share; read-only where possible.

    The copy is necessary, because NVFlare serializes it in another thread, and may use it long after the call.
    """
    for array in model.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return model


def _numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return the metrics that trackers accept: a limited number of finite numbers."""
    numbers = {name: finite_number(value) for name, value in bounded(metrics).items() if name.isprintable()}
    return {name: number for name, number in numbers.items() if number is not None}
