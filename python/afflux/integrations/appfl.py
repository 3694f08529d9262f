"""Asynchronous aggregation for APPFL: `AffluxAggregator` under its AsyncScheduler, with any rule. Clients stay as they
are. See docs/appfl.md.
"""

from collections.abc import Iterable
from functools import partial
from math import inf
from threading import RLock
from time import monotonic
from typing import Any, Literal, TypeVar

from afflux.aggregation.reports import Pulled
from afflux.integrations._appfl_config import aggregation_of, model_of, require_version
from afflux.integrations._appfl_replies import Last, id_of, last_of, means_of, trained_of
from afflux.integrations._core import NO_USE, Trained, TrainingRun, missing
from afflux.integrations._versions import OncePerVersion
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId
from afflux.server.server import Server

try:
    import torch
    from appfl import __version__ as appfl_version
    from appfl.algorithm.aggregator import BaseAggregator
except ImportError as error:
    missing("appfl", "appfl", error)

__all__ = ["AffluxAggregator"]

require_version(appfl_version)

#: Copies a tensor as soon as the copy or the original is written to, by whatever way; without it, at once.
_copy_on_write = getattr(torch, "_lazy_clone", torch.clone)
Value = TypeVar("Value")
#: Steps whose metrics are kept, the newest ones.
_STEPS_KEPT = 1000
#: What a checkpoint keeps: metrics by step.
_Notes = dict[Literal["metrics"], dict[int, dict[str, float]]]


class AffluxAggregator(BaseAggregator):
    """An aggregator that makes a server step of every M models, with any rule.

    A model is taken against the version that its client was sent: by `get_parameters` with its id, else as what
    `aggregate` returned to it, else as the first model of all. Nothing that a client sends raises; what becomes of it
    is counted, and the client gets the newest model.

    Args:
        model: the initial model; None: as `model_configs` of the configuration say, because APPFL passes none to an
            aggregator that `aggregator_path` names.
        aggregator_configs: `aggregator_kwargs` of APPFL's configuration: the rule, and settings; see docs/appfl.md.
        logger: APPFL's; None: nothing is logged.

    Attributes:
        run: the server, and the clients that train for it.
        metrics: by step, the means over its clients of the metrics that they report; of the newest 1000 steps.

    Raises:
        AffluxError, StoreError: there is no model, or the configuration is wrong; the store is of another run.
    """

    def __init__(self, model: Any = None, aggregator_configs: Any = None, logger: Any = None) -> None:
        chosen = aggregation_of(aggregator_configs)
        self._chosen, self._logger = chosen, logger
        model = model_of(chosen.model_configs) if model is None else model
        if not isinstance(model, torch.nn.Module):
            raise AffluxError(f"[appfl] model is {brief(model)}, must be a torch module")
        tree: Any = model
        self.run = TrainingRun(
            chosen.rule, tree, chosen.settings, num_clients=chosen.num_clients or 64, timeout=chosen.timeout
        )
        try:
            self.metrics = self.run.resume(_Notes, adapter="appfl").get("metrics", {})
        except BaseException:
            self.run.close()
            raise
        self._lock = RLock()
        self._noted = self.server.version
        self._resumed = self.server.joins > 0  # clients may send what they have trained for an earlier run
        self._most = 2 * self.run.concurrency  # assignments; clients may come again under other ids
        self._joined: dict[str, None] = {}  #: keys of clients whose models have joined, the newest last
        #: What was sent without an id, None if that is more than one version; and until when it counts.
        self._first: tuple[Pulled | None, float] = (None, 0.0)
        self._seen: set[str] = set()  #: keys of the clients that have had an assignment
        self._last: dict[str, Last] = {}  #: by key, of clients that were sent nothing but the answer to it
        self._sizes: dict[str, Any] = {}  #: numbers of examples, by key
        # What a module's state_dict leaves out, and APPFL's trainers send nevertheless.
        self._unsaved = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
        self._arrays_of = OncePerVersion(self._cloned)

    @property
    def server(self) -> Server:
        """Params, counts, faults, log, ..."""
        return self.run.server

    @property
    def counts(self) -> dict[str, int]:
        """How many models ended in each way: `Server.counts`, those of no version that was sent to their client, or
        that came twice ("unknown"), and clients whose time was over ("overdue").
        """
        return {**self.server.counts, **self.run.lost}

    # What APPFL calls

    def get_parameters(self, client_id: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The newest model, a copy.

        Args:
            client_id: the client that trains from it; None: a client whose id is not known yet.
            kwargs: APPFL's; with init_model=False, a request without a known id is not recorded as the start of a
                training.
        """
        with self._lock:
            client = None if client_id is None else id_of(client_id)
            pulled = self.server.pull() if client is None else self._assign(client)
            if client is not None:
                self._last.pop(ascii(client), None)
            # Under same_init_model, one call serves all clients, with the id of the last one.
            alone = kwargs.get("serial_run") or kwargs.get("globus_compute_run")
            if kwargs.get("init_model", True) and (client_id is None or not alone):
                self._sent_without_id(pulled)
            return self._copy_of(pulled)

    def aggregate(self, client_id: Any, local_model: Any, **kwargs: Any) -> dict[str, Any]:
        """Takes a client's model in; the M-th makes a step.

        Args:
            client_id: an int in 64 bits, signed or unsigned, or a str.
            local_model: arrays by name.
            kwargs: what the client's trainer reports.

        Returns:
            The newest model, a copy, from which the client trains next.
        """
        with self._lock:
            client = id_of(client_id)
            if client is None:
                return self._of_no_use(client_id, "its id is no int in 64 bits and no str", self.server.pull())
            key = ascii(client)
            own, last, base = last_of(local_model, kwargs), self._last.get(key), self.run.version_of(key)
            if last is not None and base is not None and own.mark is not None and own.mark == last.mark:
                return self._of_no_use(client, "the model has come before", base)
            if last is not None and own.round < last.round:  # it has started again, from what it was sent without an id
                self.run.cancel(key)
            self._claim_first(key, client, own.round)
            receipt = self.run.receive(key, partial(self._read, key, local_model, kwargs))
            if receipt is None:
                self._log(f"the model of client {brief(client)} is of no version that it was sent in this run")
            elif receipt.status in NO_USE:
                self._log(f"the model of client {brief(client)} is {receipt.status}: {receipt.reason}")
            if receipt is not None:
                self._remember(key, own, joined=receipt.status in ("joined", "replaced", "deferred"))
            self.run.clients.are(())  # APPFL chooses who trains: failures in a row do not count
            self._note_step()
            # In virtual time, get_parameters says what a client trains from.
            pulled = self.server.pull() if "virtual_time" in kwargs else self._assign(client)
            return self._copy_of(pulled)

    def set_client_sample_size(self, client_id: Any, sample_size: Any) -> None:
        """The client's number of examples, for its models from now on."""
        with self._lock:
            key = ascii(id_of(client_id))
            if key not in self._sizes and len(self._sizes) >= self._most:
                del self._sizes[self._to_forget(self._sizes)]
            self._sizes[key] = sample_size

    def close(self) -> None:
        """Closes the store, after a last checkpoint. Without it, the store stays at its last commit."""
        with self._lock:
            self.run.close({"metrics": self.metrics})

    # What a client trains from

    def _assign(self, client: ClientId) -> Pulled:
        """From now on the client trains from the newest version; if too many do, one of the others does no more."""
        key = ascii(client)
        self.run.cancel(key)
        if self.run.open >= self._most and not self.run.expire():
            self.run.cancel(self._to_forget(self.run.keys))
        task = self.run.assign(client)
        self.run.sent(key, task)
        self._seen.add(key)
        if len(self._seen) >= self.run.concurrency:  # none of the clients is new any more
            self._first, self._seen = (None, inf), set()
        return task.pulled

    def _to_forget(self, keys: Iterable[str]) -> str:
        """The oldest of these clients, if possible one of which no model has joined: ids may be invented."""
        known = list(keys)
        return next((key for key in known if key not in self._joined), known[0])

    def _sent_without_id(self, pulled: Pulled) -> None:
        now = monotonic()
        before, until = self._first
        unique = now >= until or (before is not None and before.version == pulled.version)
        self._first = (pulled if unique else None, max(until, now + self.run.timeout))

    def _claim_first(self, key: str, client: ClientId, trainings: int) -> None:
        """Assigns the version that was sent without an id to a client that sends its first model."""
        pulled, until = self._first
        known = self._resumed or key in self._seen or self.run.version_of(key) is not None
        if pulled is not None and not known and trainings <= 1 and self.run.open < self._most and monotonic() < until:
            self._seen.add(key)
            self.run.sent(key, self.run.assign(client), pulled=pulled)

    def _remember(self, key: str, own: Last, *, joined: bool) -> None:
        _put_last(self._last, key, own, self._most)
        if joined:
            _put_last(self._joined, key, None, self._most)

    def _copy_of(self, pulled: Pulled) -> dict[str, Any]:
        """A version for a client, which may write to it. Clients of one version share its memory until one does."""
        return {name: _copy_on_write(array) for name, array in self._arrays_of(pulled).items()}

    def _cloned(self, pulled: Pulled) -> dict[str, torch.Tensor]:
        return {name: array.clone() for name, array in self.run.versions.of(pulled).items()}

    # What becomes of a model

    def _read(self, key: str, model: Any, report: dict[str, Any]) -> Trained:
        return trained_of(model, report, self._sizes.get(key), self._chosen, self._unsaved)

    def _of_no_use(self, client: object, why: str, pulled: Pulled) -> dict[str, Any]:
        self.run.lost["unknown"] += 1
        self._log(f"the model of client {brief(client)} has no effect: {why}")
        return self._copy_of(pulled)

    def _note_step(self) -> None:
        """Logs and stores the newest version, once."""
        step, before, every = self.server.version, self._noted, self._chosen.settings.checkpoint_every
        if step == before:
            return
        self._noted = step
        self.run.expire()
        if monotonic() >= self._first[1]:
            self._first = (None, 0.0)  # the version is no longer held
        self.metrics[step] = means_of(self.run.take_metrics(), self._chosen.metrics)
        if len(self.metrics) > _STEPS_KEPT:
            del self.metrics[min(self.metrics)]
        self._log(f"step {step}: {self.metrics[step]}")
        if step // every > before // every:
            self.run.checkpoint({"metrics": self.metrics})

    def _log(self, text: str) -> None:
        if self._logger is not None:
            self._logger.info(f"afflux: {text}")


def _put_last(kept: dict[str, Value], key: str, value: Value, most: int) -> None:
    """Puts a value at the end; the first one of more than so many is left out."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
