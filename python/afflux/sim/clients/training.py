"""Local training from a pulled model, on one torch module that all clients share."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from re import sub
from traceback import extract_tb
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from afflux.aggregation.reports import Pulled
from afflux.ops.errors import AffluxError, ConfigError
from afflux.ops.validation import MOST_COUNT, brief, known, raise_if_from_signal, shortened
from afflux.server.server import Server
from afflux.sim.clients.batches import batch_indices, call, gives_batches, has_room, on_device, resident, take
from afflux.sim.clients.compiled_training import EAGER_BATCHES, CompiledStep, GraphedStep, NativeStep
from afflux.sim.clients.flat_model import FlatModel
from afflux.sim.errors import DivergedError, TrainingError, note_on_errors, text_with_notes
from afflux.sim.workload.config import IMAGES, PAPERS, PROXIMAL, SETTINGS, SimConfig, keyword_settings
from afflux.sim.workload.evaluation import CLASSIFICATION, Classification, add_note_on_examples, class_loss
from afflux.sim.workload.random_streams import StreamPurpose, random_stream, seed_globals
from afflux.sim.workload.task import Task, TrainingFunction, num_examples

#: The number of batches whose examples are read from the data in one operation, for compiled steps and on a GPU.
BATCHES_AT_ONCE = 32


#: Called with the gradient (d,), to which it adds in place, and the local model y (d,).
GradientTerm = Callable[[torch.Tensor, torch.Tensor], object]


class SentModel(NamedTuple):
    """The model that was sent to one client."""

    client: int
    model: Pulled
    shift: np.ndarray | None  #: SCAFFOLD's c - c_i (d,), with the c of that version; None for other client optimizers.
    after: int  #: Number of arrivals that the server had handled when that model was the newest.


class TrainingResult(NamedTuple):
    """The result of one local training."""

    update: np.ndarray  #: (d,) local - pulled params.
    num_examples: int
    loss: float | None  #: None: the training function does not know it.
    steps: int  #: Number of local steps, K.
    buffers: np.ndarray | None = None  #: The client's buffers, float64; None if the model has none.
    fault: str = ""  #: The exception that has ended the training; the loss is then nan, and so is the update.

    @classmethod
    def failed(cls, error: Exception, d: int) -> "TrainingResult":
        """Return the result of a training that has raised."""
        place = extract_tb(error.__traceback__)[-1]
        # An address is another one in each process.
        text = sub("0x[0-9a-fA-F]+", "0x...", f"{type(error).__name__}: {text_with_notes(error)}")
        fault = f"{shortened(text)} ({Path(place.filename).name}, line {place.lineno})"
        return cls(np.full(d, np.nan, np.float32), 0, math.nan, 0, None, fault)


class Training(Protocol):
    """Where the clients of a run train: in this process, or in others."""

    def submit(self, sequence: int, finish: float, sent: SentModel) -> None:
        """Note that dispatch number `sequence` has begun, whose result is needed at virtual time `finish`."""

    def take(self, sequence: int, sent: SentModel) -> TrainingResult:
        """Return the result of a dispatch at its arrival; its arrays are valid until `release`."""

    def release(self, sequence: int) -> None:
        """Note that the arrays of a result are no longer needed."""


class Trainer:
    """The training of all clients on one module, and the evaluation of models."""

    def __init__(self, model: FlatModel, data: Sequence[Any], task: Task, config: SimConfig) -> None:
        """Make a trainer.

        Args:
            model: changed by every training and evaluation.
            data: the data set of each client.
            task: its training function, loss, evaluation and validation data.
            config: the settings.
        """
        test = task.evaluate
        if model.device != "cpu" and isinstance(test, Classification) and has_room(test.x, model.device):
            task = replace(task, evaluate=replace(test, x=test.x.to(model.device)))
        self._model = model
        self._data = data
        self._config = config
        self._task = task
        self._loss = task.loss or class_loss
        self._training = None if task.training is None else with_settings(task.training, config)
        if config.compile and self._training is not None:
            raise ConfigError("the task has a training function of its own, which compile does not support")
        self._resident: dict[int, Any] = {}
        # A vector that no term reads is the model's own: nothing is allocated for it.
        self._pulled = torch.zeros_like(model.flat) if config.client_optimizer in PROXIMAL else model.flat
        self._shift = torch.zeros_like(model.flat) if config.client_optimizer == "scaffold" else model.flat
        self._terms: Sequence[GradientTerm] = ()
        self._compiled: CompiledStep | None = None
        # Networks of the package do the same each time; another module may not, unless the setting says so.
        if model.device != "cpu" and (config.compile or config.task.partition(":")[0] in (IMAGES, PAPERS)):
            self._compiled = CompiledStep(GraphedStep(model, config.compile).compile_like, EAGER_BATCHES)
        elif config.compile:
            native = NativeStep(model, self._loss, config, self._pulled, self._shift)
            self._compiled = CompiledStep(native.compile_like)

    def train(
        self,
        client: int,
        pulled: np.ndarray,
        rng: np.random.Generator,
        shift: np.ndarray | None = None,
        buffers: np.ndarray | None = None,
    ) -> TrainingResult:
        """Train as a client does.

        Args:
            client: the client.
            pulled: (d,) float32, the params from which it starts.
            rng: the dispatch's own stream, for the number of steps, if that is random, and then for the batches.
            shift: (d,) SCAFFOLD's c - c_i.
            buffers: the pulled buffers, if the model has any.

        Returns:
            The result. With the setting faults="record", it may be that of a training that has raised.

        Raises:
            ConfigError: the training function returns an invalid result, or the optimizer does not support the data.
            TrainingError: the training has raised, with the setting faults="raise".
        """
        model = self._model
        model.load(pulled, buffers)
        if self._task.seeds_torch:
            self._seed(int(rng.integers(2**63)))
        loss: float | None
        try:
            if self._training is None:
                loss, steps, examples = self._local_steps(client, rng, shift)
            else:
                model.clear_gradients()
                loss, steps, examples = _checked(self._training(model.module, self._data[client], rng))
            model.check_trained()
            model.check_frozen()
            trained = model.buffers()
        except Exception as error:
            raise_if_from_signal(error)
            failed = TrainingResult.failed(error, len(pulled))
            expected = not isinstance(error, AffluxError | MemoryError | torch.cuda.OutOfMemoryError)
            if expected and self._config.faults == "record":
                return failed
            error.add_note(f"while client {client} trained")
            if expected:
                raise TrainingError(f"client {client} failed to train: {failed.fault}") from error
            raise
        return TrainingResult(model.params - pulled, examples, loss, steps, trained)

    def _seed(self, seed: int = 0) -> None:
        """Seed the generators from which a user's code may draw; 0: those of evaluations, which all have the same."""
        if self._model.device == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        seed_globals(seed)

    def _local_steps(self, client: int, rng: np.random.Generator, shift: np.ndarray | None) -> tuple[float, int, int]:
        data, config = self._data[client], self._config
        size = self._count(data)
        if self._model.device != "cpu" and isinstance(self._data, list | tuple):  # others may give new data each time
            if client not in self._resident:
                self._resident[client] = resident(data, self._model.device)
            data = self._resident[client]
        steps = self._steps(size, rng)
        indices = batch_indices(size, config.batch_size, steps, rng, config.drop_last)
        self._terms = self._gradient_terms(shift)
        losses, lengths, total = [], [], 0.0
        for x, y, length in self._batches(data, indices):
            if self._compiled is not None and (length == config.batch_size or self._model.device != "cpu"):
                losses.append(self._compiled(x, y, self._step))
            else:
                losses.append(self._step(x, y))
            lengths.append(length)
        # Only here a GPU is waited for.
        for loss, length in zip(torch.stack(losses).reshape(-1).tolist(), lengths, strict=True):
            total += loss * length
        return total / sum(lengths), steps, min(size, config.batch_size) if config.examples == "batch" else size

    def _batches(self, data: Any, indices: Iterator[np.ndarray]) -> Iterator[tuple[Any, torch.Tensor, int]]:
        """Yield x, y and the number of examples of each batch, on the model's device."""
        device = self._model.device
        if self._compiled is None and (device == "cpu" or not gives_batches(data)):
            yield from ((*on_device(take(data, batch), device), len(batch)) for batch in indices)
            return
        while batches := list(islice(indices, BATCHES_AT_ONCE)):
            leaves, structure = tree_flatten(on_device(take(data, np.concatenate(batches)), device))
            if kinds := {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)}:
                raise ConfigError(f"compile needs data of tensors, not of {', '.join(sorted(kinds))}")
            sizes = [len(batch) for batch in batches]
            for size, *parts in zip(sizes, *(leaf.split(sizes) for leaf in leaves), strict=True):
                yield *tree_unflatten(parts, structure), size

    def _step(self, x: Any, y: torch.Tensor) -> torch.Tensor:
        """Make one step by autograd; return the mean loss before the step."""
        model = self._model
        loss = self._backward(x, y)
        for term in self._terms:
            term(model.gradient, model.flat)
        model.flat.add_(model.gradient, alpha=-self._config.client_lr)
        return loss

    def _count(self, data: Any) -> int:
        """Return the number of examples of a client; raise ConfigError if there are none, or other labels."""
        size = num_examples(data)
        if isinstance(data, torch.utils.data.DataLoader):
            raise ConfigError("a client's data set is a DataLoader: give its dataset; the training draws the batches")
        if not size:
            raise ConfigError(f"a client's data set is {brief(data)}: it has no examples that can be counted")
        for leaf in tree_leaves(data[0]) if isinstance(data, tuple) and len(data) == 2 else ():
            if hasattr(leaf, "__len__") and len(leaf) != size:
                raise ConfigError(f"a client's data set has {len(leaf)} examples, but {size} labels")
        return size

    def rule_vector(self, name: str, model: Pulled, examples: np.ndarray) -> np.ndarray:
        """Return the vector (d,) that rules are handed under this name, at this version.

        It is the task's own, or the mean gradient over these examples of the validation data.
        """
        self._model.load(model.params, model.buffers)
        if self._task.seeds_torch:
            self._seed()
        if (function := self._task.vectors.get(name)) is not None:
            with note_on_errors(f"while the vector {name} was computed"):
                return torch.as_tensor(function(self._model.module), dtype=torch.float32).numpy(force=True)
        self._backward(*on_device(take(self._task.validation, examples), self._model.device))
        return self._model.gradient.numpy(force=True).copy()

    def _steps(self, num_examples: int, rng: np.random.Generator) -> int:
        config = self._config
        if config.local_epochs:
            batches = num_examples / config.batch_size
            return config.local_epochs * (max(1, int(batches)) if config.drop_last else math.ceil(batches))
        if config.steps_law == "uniform":
            return int(rng.integers(1, 2 * config.local_steps, endpoint=True))
        return config.local_steps

    def _gradient_terms(self, shift: np.ndarray | None) -> list[GradientTerm]:
        """Return the terms that the client optimizer adds to a gradient (d,), before y <- y - client_lr * gradient.

        Weight decay: weight_decay * y. fedprox: mu * (y - x), x the pulled model, the gradient of mu |y - x|^2 / 2 (Li
        et al., 2020); FedAsync (Xie et al., 2019) calls it its proximal rho. scaffold: c - c_i, constant during one
        training (see `ControlVariates`).
        """
        config, start, own_shift = self._config, self._pulled, self._shift
        terms: list[GradientTerm] = []
        if config.weight_decay:
            terms.append(lambda gradient, local: gradient.add_(local, alpha=config.weight_decay))
        if config.client_optimizer in PROXIMAL:
            start.copy_(self._model.flat)
            terms.append(lambda gradient, local: gradient.add_(local - start, alpha=config.mu))
        if config.client_optimizer == "scaffold":
            assert shift is not None
            own_shift.copy_(torch.from_numpy(shift))
            terms.append(lambda gradient, local: gradient.add_(own_shift))
        return terms

    def _backward(self, x: Any, y: torch.Tensor) -> torch.Tensor:
        """Fill the flat gradient with that of the mean loss over (x, y) at the local model; return the loss."""
        self._model.zero_gradient()
        try:
            loss = self._loss(call(self._model.module, x), y)
        except Exception as error:
            add_note_on_examples(error, x)
            raise
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"loss returns {brief(loss)}, must return a tensor, the mean loss of a batch")
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().clone()  # it may be a param itself

    def evaluate(self, params: np.ndarray, buffers: np.ndarray | None = None) -> tuple[float, ...]:
        """Return the values of the task's metrics of `params` (d,) on the test part.

        Raises:
            ConfigError: the evaluation function returns something else.
        """
        self._model.load(params, buffers)
        return self._values("evaluate", self._task.evaluate)

    def evaluate_client(
        self, client: int, params: np.ndarray, buffers: np.ndarray | None, rng: np.random.Generator
    ) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Yield "server" and the values of the metrics on a client's data; the same of the "personal" model, if any.

        Raises:
            ConfigError: the evaluation function returns something else.
        """
        task, data = self._task, self._data[client]
        assert task.evaluate_client is not None
        with note_on_errors(f"while client {client} was evaluated"):
            self._model.load(params, buffers)
            yield "server", self._values("evaluate_client", task.evaluate_client, data)
            if task.personalise is not None:
                self._model.load(params, buffers)
                if task.seeds_torch:
                    self._seed(int(rng.integers(2**63)))
                task.personalise(self._model.module, data, rng)
                yield "personal", self._values("evaluate_client", task.evaluate_client, data)

    def _values(self, name: str, function: Callable[..., Any], *data: Any) -> tuple[float, ...]:
        """Call an evaluation function on the model as it is, and return the values of the metrics."""
        if self._task.seeds_torch:
            self._seed()
        with note_on_errors("while the model was evaluated, without gradients"), self._model.evaluated() as module:
            values = function(module, *data)
            self._model.check_frozen()
        metrics = [metric.name for metric in self._task.metrics]
        try:
            if isinstance(values, Mapping):
                if {*values} == {*metrics}:
                    return tuple(float(values[metric]) for metric in metrics)
            elif self._task.metrics == CLASSIFICATION:
                accuracy, loss = values
                return float(accuracy), float(loss)
        except (TypeError, ValueError):
            pass
        wanted = f"a dict with a number for {', '.join(metrics)}, the names of metrics="
        wanted = "accuracy, loss" if self._task.metrics == CLASSIFICATION else wanted
        raise ConfigError(f"{name} returns {brief(values)}, must return {wanted}") from None


class SerialTraining:
    """Trainings in this process, one by one: each when its result arrives."""

    def __init__(self, trainer: Trainer, seed: int) -> None:
        """Begin a run with this seed."""
        self._trainer, self._seed = trainer, seed

    def take(self, sequence: int, sent: SentModel) -> TrainingResult:
        """Train the client of dispatch number `sequence`; see `Trainer.train`."""
        batches, model = random_stream(self._seed, StreamPurpose.BATCHES, sequence), sent.model
        return self._trainer.train(sent.client, model.params, batches, sent.shift, model.buffers)

    def submit(self, sequence: int, finish: float, sent: SentModel) -> None:
        """See `Training`. Nothing begins before `take`."""

    def release(self, sequence: int) -> None:
        """See `Training`. Each training has arrays of its own."""


class HandedInVectors:
    """The vectors that a rule is handed, which are refreshed during the run.

    They are the task's `vectors`, or the mean gradient over a few examples, drawn without replacement from the
    validation data; for images, from the whole training part.
    Clients may hold these examples, too; the shards of the clients do not depend on them.
    """

    def __init__(
        self, server: Server, trainer: Trainer, available: int, count: int, every: int, rng: np.random.Generator
    ) -> None:
        """Draw the examples and set the first vectors.

        Args:
            server: of a rule that is handed vectors.
            trainer: computes them.
            available: examples of the validation data.
            count: examples to draw.
            every: versions of params between two vectors.
            rng: stream for the draw.
        """
        self._server = server
        self._trainer = trainer
        self._examples = np.sort(rng.choice(available, min(count, available), replace=False))
        self._every = every
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Set the vectors at the current params if their version is new and a multiple of `every`.

        Raises:
            DivergedError: after the first version, it has a value that is not finite, or that exceeds max_abs.
        """
        version = self._server.version
        if version != self._version and version % self._every == 0:
            model = self._server.pull()
            for name in self._server.rule.needs.handed_in:
                vector = self._trainer.rule_vector(name, model, self._examples)
                try:
                    self._server.set_rule_vector(name, vector)
                except AffluxError as error:
                    if type(error) is not AffluxError or not version:  # of the store, or of the data themselves
                        raise
                    reason = str(error).removeprefix("[set_rule_vector] ")
                    text = f"the vector {name} diverged at version {version}: {reason}; lower client_lr or server_lr"
                    raise DivergedError(text) from None
        self._version = version


def with_settings(function: TrainingFunction, config: SimConfig) -> TrainingFunction:
    """Return `function` with the settings that it takes as keyword-only parameters.

    Raises:
        ConfigError: it takes a keyword-only parameter that is no setting, and has no default; or it does not take
            (model, data, rng).
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            known("setting of the training function:", p.name, SETTINGS)
    wanted = keyword_settings(function)
    try:
        signature.bind("model", "data", "rng", **dict.fromkeys(wanted))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"training {name}{signature} must take (model, data, rng): {error}") from None
    return partial(function, **{name: getattr(config, name) for name in wanted}) if wanted else function


def _checked(result: Any) -> tuple[float | None, int, int]:
    """Check the result of a training function, and return loss, steps and examples; a loss may be None."""
    try:
        loss, steps, examples = result
        loss, steps, examples = None if loss is None else float(loss), int(steps), int(examples)
    except (TypeError, ValueError):
        raise ConfigError(f"training returns {brief(result)}, must return loss, steps, examples") from None
    if not (0 < steps < MOST_COUNT and 0 < examples < MOST_COUNT):
        counts = f"{brief(steps)} steps and {brief(examples)} examples"
        raise ConfigError(f"training returns {counts}, must be at least 1 of each, and fewer than 2**53")
    return loss, steps, examples
