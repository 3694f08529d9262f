"""Asynchronous aggregation for APPFL: `AffluxAggregator` under its AsyncScheduler, with any rule. Clients stay as they
are. See docs/guides/appfl.md.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, Literal

from afflux.aggregation.reports import Pulled
from afflux.integrations._appfl_clients import KnownClients
from afflux.integrations._appfl_config import aggregation_of, model_of
from afflux.integrations._appfl_replies import id_of, last_of, number_of
from afflux.integrations._core import JOINED, NO_USE, Trained, TrainingRun
from afflux.integrations._frameworks import missing, warn_of_version
from afflux.integrations._reading import fraction_of, means_of
from afflux.integrations._settings import is_due
from afflux.integrations._versions import OncePerVersion
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_int, brief

try:
    import torch
    from appfl import __version__ as appfl_version
    from appfl.algorithm.aggregator import BaseAggregator
except ImportError as error:
    missing("appfl", "appfl", error)

__all__ = ["AffluxAggregator"]

warn_of_version("appfl", "1.12", appfl_version)

#: Copies a tensor when the copy or the original is first written to; if torch lacks this function, at once.
_copy_on_write = getattr(torch, "_lazy_clone", torch.clone)
#: Seconds. APPFL has no timeouts, and a simulated client may wait for a long time while others train.
_TIMEOUT = 86400.0
#: The name of a client's weight among its metrics.
_WEIGHT = ""
#: The number of newest steps whose metrics are kept.
_STEPS_KEPT = 1000
#: The notes of a checkpoint: metrics by step.
_Notes = dict[Literal["metrics"], dict[int, dict[str, float]]]


class AffluxAggregator(BaseAggregator):
    """An aggregator whose server takes a step after every M models, with any rule.

    A client's model is compared with the version that this client got: from `get_parameters` with its id, or from
    `aggregate`, or as the first model that was sent without an id. No message of a client raises an error; its outcome
    is counted, and the client gets the newest model. But `aggregate` raises an error if all clients fail.

    Args:
        model: the initial model; None: that of the configuration's `model_configs`, because APPFL passes no model to
            an aggregator that `aggregator_path` names.
        aggregator_configs: `aggregator_kwargs` of APPFL's configuration: rule and settings; see docs/guides/appfl.md.
        logger: APPFL's logger; None: nothing is logged.

    Attributes:
        server: the `afflux.Server`: params, counts, faults, log, ...
        run: the server, and the clients that train for it.
        metrics: by step, the means of the metrics that its clients report; of the newest 1000 steps.

    Raises:
        AffluxError, StoreError: there is no model, or the configuration is wrong; the store belongs to another run.
    """

    def __init__(self, model: Any = None, aggregator_configs: Any = None, logger: Any = None) -> None:
        self._chosen = chosen = aggregation_of(aggregator_configs)
        self._logger = logger
        model = model_of(chosen.model_configs) if model is None else model
        if not isinstance(model, torch.nn.Module):
            raise AffluxError(f"[appfl] model is {brief(model)}, must be a torch module")
        settings = replace(chosen.settings, timeout=chosen.settings.timeout or _TIMEOUT)
        self.run = TrainingRun(chosen.rule, model, settings, num_clients=chosen.num_clients or 64)
        self.server = self.run.server
        self.metrics = self.run.resume(_Notes, adapter="appfl").get("metrics", {})
        self.run.clients.warn = lambda text, *values: self._log(text % values)
        self._lock = RLock()
        self._noted = self.server.version
        self._clients = KnownClients(self.run)
        # Arrays that are not in a module's state_dict, but that APPFL's trainers send.
        self._unsaved = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
        self._arrays_of = OncePerVersion(lambda pulled: _copies(self.run.versions.of(pulled), torch.clone))

    @property
    def counts(self) -> dict[str, int]:
        """The number of models by outcome: `Server.counts`; "unknown": no version was sent to their client, or they
        arrived twice; "overdue": clients that exceeded the timeout.
        """
        return self.run.counts

    # What APPFL calls

    def get_parameters(self, client_id: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return a copy of the newest model.

        Args:
            client_id: the client that trains from it; None: a client whose id is not known yet.
            kwargs: APPFL's arguments; with init_model=False, a request without a known id does not count as the start
                of a training.
        """
        with self._lock, self.run.untimed():  # clients that wait for the lock are not late
            client = id_of(client_id)
            if client is not None:
                self._clients.of(client).last = None
            pulled = self.server.pull() if client is None else self._clients.assign(client)
            # Under same_init_model, one call serves all clients, with the id of the last one.
            alone = kwargs.get("serial_run") or kwargs.get("globus_compute_run")
            if kwargs.get("init_model", True) and (client_id is None or not alone):
                self._clients.sent_without_id(pulled)
            return self._copy_of(pulled)

    def aggregate(self, client_id: Any, local_model: Any, **kwargs: Any) -> dict[str, Any]:
        """Push a client's model; the server takes a step with the M-th one.

        Args:
            client_id: an int in 64 bits, signed or unsigned, or a str.
            local_model: arrays by name.
            kwargs: the report of the client's trainer.

        Returns:
            A copy of the newest model, from which the client trains next.

        Raises:
            RuntimeError: the models of all num_clients clients were unusable, each max_failures times in a row; or once
                each, if no model has joined; or the rule has room for none of these clients.
        """
        with self._lock, self.run.untimed():  # clients that wait for the lock are not late
            client = id_of(client_id)
            if client is None:
                return self._of_no_use(client_id, "its id is neither an int in 64 bits nor a str", self.server.pull())
            known, own = self._clients.of(client), last_of(local_model, kwargs)
            assigned = self.run.assignments.get(client)
            base = None if assigned is None else assigned.base
            if known.last is not None and base is not None and own.mark is not None and own.mark == known.last.mark:
                return self._of_no_use(client, "the model has come before", base)
            if known.last is not None and own.round < known.last.round:
                self.run.cancel(client)  # it has restarted; its model is from the version sent without an id
            self._clients.claim_first(client, own.round)
            receipt = self.run.receive(client, partial(self._trained, local_model, kwargs, known.size))
            if receipt is None:
                self._log(
                    f"the model of client {brief(client)} is of no version that it was sent in this run, or the client "
                    "had entered in the pass, or in as many rounds as the rule allows"
                )
            else:
                known.last, known.joined = own, known.joined or receipt.status in JOINED
                if receipt.status in NO_USE:
                    self._require_some_of_use(receipt.reason)
            self.run.poll()
            self._note_step()
            # In virtual time, get_parameters determines the version that a client trains from.
            return self._copy_of(self.server.pull() if "virtual_time" in kwargs else self._clients.assign(client))

    def set_client_sample_size(self, client_id: Any, sample_size: Any) -> None:
        """Set the client's number of examples, for its later models."""
        with self._lock:
            client = id_of(client_id)
            if client is not None:
                self._clients.of(client).size = sample_size

    def close(self) -> None:
        """Close the store, after a last checkpoint. Without this call, the store stays at its last commit."""
        with self._lock:
            self.run.close({"metrics": self.metrics})

    def _require_some_of_use(self, reason: str) -> None:
        """Raise RuntimeError if all clients fail repeatedly, or once while no model has joined, or if none may train.

        One client, or a few with forged ids, never end a run: as many clients as the run has must have failed.
        """
        ids, count, clients = self._clients.ids, self._chosen.num_clients, self.run.clients
        if count is not None and len(ids) >= count:
            if not clients.there:  # the rule has room for none of them
                raise RuntimeError(f"none of {len(ids)} clients may train: {reason}")
            clients.require_some_of_use(most=None if self.server.joins else 1)

    def _trained(self, model: Any, report: Mapping[str, Any], size: Any) -> Trained:
        """Return a client's model, with the known facts about it.

        Args:
            model: arrays by name.
            report: the report of the trainer.
            size: the client's number of examples; None: unknown.

        Raises:
            ValueError: the model is not a dict.
        """
        if not isinstance(model, Mapping):
            raise ValueError(f"the model is a {type(model).__name__}, must be a dict of arrays")
        if self._chosen.equal_weights:  # but clients without examples have not trained
            count = 1 if size is None or fraction_of(size) is not None else as_int(size)
            size = size if count is None else min(count, 1)
        if self._unsaved:
            model = {name: array for name, array in model.items() if name not in self._unsaved}
        numbers = {name: number_of(report.get(name)) for name in self._chosen.metrics}
        metrics = {name: number for name, number in numbers.items() if number is not None}
        metrics[_WEIGHT] = fraction_of(size) or as_int(size) or 1
        loss, steps = number_of(report.get(self._chosen.loss_key)), as_int(report.get("current_local_steps"))
        facts = {name: number_of(report.get(name)) for name in self.run.fact_names}
        return Trained(model, size, loss, None, steps if steps and steps > 0 else None, metrics, facts=facts)

    def _copy_of(self, pulled: Pulled) -> dict[str, Any]:
        """Return a writable version for a client. Clients of one version share its memory until one writes to it."""
        return _copies(self._arrays_of(pulled), _copy_on_write)

    def _of_no_use(self, client: object, why: str, pulled: Pulled) -> dict[str, Any]:
        self.run.lost["unknown"] += 1
        self._log(f"the model of client {brief(client)} has no effect: {why}")
        return self._copy_of(pulled)

    def _note_step(self) -> None:
        """Log and store the newest version, once."""
        step, before = self.server.version, self._noted
        if step == before:
            return
        self._noted = step
        self.run.expire()
        self.metrics[step] = means_of(self.run.take_metrics(), _WEIGHT)
        if len(self.metrics) > _STEPS_KEPT:
            del self.metrics[min(self.metrics)]
        self._log(f"step {step}: {self.metrics[step]}")
        if is_due(self.run.settings.checkpoint_every, before, step):
            self.run.checkpoint({"metrics": self.metrics})

    def _log(self, text: str) -> None:
        if self._logger is not None:
            self._logger.info(f"afflux: {text}")


def _copies(arrays: Mapping[str, Any], copy: Callable[[Any], Any]) -> dict[str, Any]:
    """Return copies of tensors; a module's extra state may be another object."""
    return {name: (copy if isinstance(value, torch.Tensor) else deepcopy)(value) for name, value in arrays.items()}
