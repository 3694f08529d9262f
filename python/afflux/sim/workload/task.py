"""The task of the clients: a model, a data set for each client, a training function and an evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief, known
from afflux.sim.data.image_set import stratified_split
from afflux.sim.workload.delays import DelayLaw
from afflux.sim.workload.evaluation import (
    CLASSIFICATION,
    Classification,
    Metric,
    as_arrays,
    classification,
    refuse_nonfinite,
)
from afflux.sim.workload.partitions import BY_CLASSES, PARTITIONS
from afflux.sim.workload.random_streams import StreamPurpose, random_stream, restored_globals, seed_globals

if TYPE_CHECKING:
    from torch import nn

#: (model, data, rng) -> mean loss or None, local steps, examples.
#:
#: The model holds the pulled params; it is trained in place.
TrainingFunction: TypeAlias = Callable[..., tuple[float | None, int, int]]
#: Accuracy and loss; or the values of the task's metrics, by name.
Values: TypeAlias = tuple[float, float] | Mapping[str, float]
#: (model) -> values. The model is in evaluation mode, under `torch.no_grad()`.
Evaluate: TypeAlias = Callable[["nn.Module"], Values]
#: (model, data) -> values on the data set of one client, as `Evaluate`.
EvaluateClient: TypeAlias = Callable[["nn.Module", Any], Values]
Loss: TypeAlias = Callable[[Any, Any], Any]  #: (output of the model, labels) -> mean loss, a torch scalar.


#: The rule vector of rules that score updates by the gradient on the server's own validation data (Zeno++).
VALIDATION_VECTOR = "validation"
#: The share of the training examples of each class in the validation part.
VALIDATION_SHARE = 0.2


@runtime_checkable
class SeededClients(Protocol):
    """Clients whose data depend on the seed of the run."""

    def for_seed(self, seed: int) -> Sequence[Any]:
        """Return the data set of each client."""


@dataclass(frozen=True, eq=False)
class Task:
    """The task of the clients: the model, its data, training and evaluation.

    Everything is made again for each run and each worker process, from the seed of the run alone.
    """

    #: A torch module, which is copied; or a function that makes one, without arguments or with a NumPy generator.
    #:
    #: torch's own random numbers are seeded before the function is called. Parameters that require no gradient stay as
    #: they are; buffers, such as BatchNorm's statistics, are averaged by the server, except those of frozen modules.
    model: "nn.Module | Callable[..., nn.Module]"
    #: The data set of each client: a sequence, or `partitioned(...)`, or a function of the client's number.
    #:
    #: The function may take a NumPy generator, too, which depends on the seed and on the client. It is called whenever
    #: the client trains, and its result is not kept. It needs `num_clients`.
    clients: "Sequence[Any] | SeededClients | Callable[..., Any]"
    evaluate: Evaluate  #: See `Evaluate`; for example `classification(x, y)`.
    #: The clients' training; None: the optimizer of the settings (sgd, fedprox, fedasync or scaffold).
    #:
    #: It may have keyword-only parameters with the names of settings, such as client_lr, and gets their values.
    training: TrainingFunction | None = None
    num_clients: int | None = None  #: Number of clients, if `clients` is a function.
    loss: Loss | None = None  #: The loss for the optimizers of the settings; None: cross entropy.
    #: Data set (x, y) of the server, for rules that score updates by a validation gradient (Zeno++).
    validation: Any = None
    #: By name, the other vectors that the user hands to rules: functions (model) -> (d,), of the server's model.
    #:
    #: They are called when the gradient on `validation` would be computed. One named "validation" replaces it.
    vectors: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    #: Evaluation on validation data, for the setting part="validation", that is for grids.
    #:
    #: None: a fifth of the training examples, if `clients` is `partitioned(...)` and `evaluate` is
    #: `classification(...)`.
    tuning: Evaluate | None = None
    delays: DelayLaw | None = None  #: The running times, for the setting delays="task".
    #: Whether the random numbers of torch, `np.random` and `random` are seeded before each training and evaluation, for
    #: dropout and the like.
    seeds_torch: bool = True
    #: The data as they were read, or a text that names their version: its SHA-256 is in the log, to notice other data.
    #:
    #: None: the data sets of the clients, if they are no function, and those of `classification` and `validation`.
    source: Any = None
    #: The roles of the model's arrays by patterns of names; see `afflux.Layout.of`. None: the defaults.
    roles: Mapping[str, Any] | None = None
    #: What `evaluate` returns: accuracy and loss, or a dict with a number for each of these names.
    #:
    #: Tables, figures, grids and the target take the first one.
    metrics: Sequence[Metric] = CLASSIFICATION
    #: Evaluation on the data set of one client, for a sample of clients at the end of a run; see `fairness_every`.
    evaluate_client: EvaluateClient | None = None
    #: (model, data, rng): adapts the server's model to one client, in place, for a second such evaluation.
    personalise: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if the parts do not go together."""
        clients = self.clients
        if isinstance(clients, tuple) and len(clients) == 2 and all(hasattr(data, "shape") for data in clients):
            raise ConfigError(
                "clients is a pair of arrays, which would be the data sets of two clients: divide the examples by "
                "partitioned(x, y, num_clients=...), or give a list of data sets (x, y)"
            )
        if isinstance(clients, Mapping):
            raise ConfigError("clients is a mapping, must be a list: clients are numbered from 0")
        lazy = callable(clients) and not isinstance(clients, SeededClients)
        if lazy and self.num_clients is None:
            raise ConfigError("clients is a function: give num_clients, too")
        if not lazy and self.num_clients is not None:
            raise ConfigError("num_clients is given, but clients is no function: their number is its length")
        if lazy and (self.num_clients or 0) < 1:
            raise ConfigError(f"num_clients is {self.num_clients}, must be at least 1")
        metrics = tuple(self.metrics) if isinstance(self.metrics, Sequence) else ()
        if not metrics or not all(isinstance(metric, Metric) for metric in metrics):
            raise ConfigError(f"metrics is {brief(self.metrics)}, must be a sequence of afflux.sim.Metric")
        if len({metric.name for metric in metrics}) < len(metrics):
            raise ConfigError("two metrics have one name")
        object.__setattr__(self, "metrics", metrics)
        if self.personalise is not None and self.evaluate_client is None:
            raise ConfigError("personalise is given: give evaluate_client, too")
        if not isinstance(self.vectors, Mapping) or not all(map(callable, self.vectors.values())):
            raise ConfigError(f"vectors is {brief(self.vectors)}, must be functions of the model by name")
        for name in ("evaluate", "training", "tuning", "delays", "evaluate_client", "personalise"):
            if not callable(part := getattr(self, name)) and (part is not None or name == "evaluate"):
                raise ConfigError(f"{name} is {brief(part)}, must be a function")

    @property
    def count(self) -> int | None:
        """Number of clients; None: it depends on the seed."""
        if self.num_clients is not None:
            return self.num_clients
        if isinstance(self.clients, SeededClients):
            return getattr(self.clients, "num_clients", None)
        return len(self.clients)  # type: ignore[arg-type]

    def data_for_seed(self, seed: int) -> Sequence[Any]:
        """Return the data set of each client under `seed`."""
        if isinstance(self.clients, SeededClients):
            return self.clients.for_seed(seed)
        if callable(self.clients):
            return _LazyClients(self.clients, int(self.num_clients or 0), seed, draws=self.seeds_torch)
        return self.clients


def tuned_on_validation(task: Task) -> Task:
    """Return the task whose evaluation is on a validation part, which no client has.

    Raises:
        ConfigError: the task has no `tuning`, and its examples cannot be divided.
    """
    if task.tuning is not None:
        return replace(task, evaluate=task.tuning)
    clients = task.clients
    if not isinstance(clients, Partitioned) or not isinstance(task.evaluate, Classification):
        raise ConfigError(
            "the task has no validation part: give tuning=, an evaluation like evaluate= on examples that no client has"
        )
    training, validation = stratified_split(np.asarray(clients.y), VALIDATION_SHARE)
    evaluate = classification(*clients.examples(validation))
    examples = task.validation
    if examples is not None and examples[1] is clients.y:  # the server's examples are those of all clients
        examples = clients.examples(training)
    divided = replace(clients, x=clients.x[training], y=clients.y[training])
    return replace(task, clients=divided, evaluate=evaluate, validation=examples)


class _LazyClients(Sequence[Any]):
    """Data sets that are made when they are read, and are not stored."""

    def __init__(self, make: Callable[..., Any], count: int, seed: int, *, draws: bool) -> None:
        self._make, self._count, self._seed, self._draws = make, count, seed, draws
        self._random = positional_parameters(make) > 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, client: Any) -> Any:
        streams = [random_stream(self._seed, StreamPurpose.CLIENT_DATA, client)] if self._random else []
        if not self._draws:
            return self._make(client, *streams)
        with restored_globals():  # the training that reads the data continues with its own
            seed_globals(int(random_stream(self._seed, StreamPurpose.CLIENT_GLOBALS, client).integers(2**63)))
            return self._make(client, *streams)


def clients_with_data(data: Sequence[Any]) -> Sequence[int]:
    """Return the numbers of the clients that hold examples; of data sets that are made when needed, all clients."""
    if not isinstance(data, list | tuple):
        return range(len(data))
    return tuple(client for client, own in enumerate(data) if num_examples(own) != 0)


def num_examples(data: Any) -> int | None:
    """Return the number of examples of a client's data set: (x, y), or anything with a length; None: not known."""
    if isinstance(data, tuple) and len(data) == 2 and hasattr(data[1], "__len__"):
        return len(data[1])
    return len(data) if hasattr(data, "__len__") else None


class Batched(ABC):
    """A client's data set that gives whole batches."""

    def to(self, device: str) -> "Batched":
        """Return the same data set with its arrays on a device; as it is if its batches are made on the host."""
        return self

    @abstractmethod
    def batch(self, places: list[int]) -> tuple[Any, Any]:
        """Return (x, y) of these examples."""


@dataclass(frozen=True, eq=False)
class Partitioned:
    """One data set that is divided among clients, in another way for each seed."""

    x: Any
    y: Any
    num_clients: int
    partition: str = "dirichlet"
    heterogeneity: float = 0.1

    @property
    def division(self) -> dict[str, Any]:
        """The partition and the number that it takes, by the names of the settings."""
        own = {"alpha": self.heterogeneity} if self.partition == "dirichlet" else {}
        own |= {"classes": self.heterogeneity} if self.partition in BY_CLASSES else {}
        return {"partition": self.partition} | own

    def examples(self, index: np.ndarray) -> tuple[Any, Any]:
        """Return (x, y) of these examples, as they are evaluated."""
        return self.x[index], self.y[index]

    def for_seed(self, seed: int) -> "Divided":
        """Return (x, y) of each client; some may be empty."""
        rng = random_stream(seed, StreamPurpose.PARTITION)
        shards = PARTITIONS[self.partition](np.asarray(self.y), self.num_clients, self.heterogeneity, rng)
        return Divided(self.x, self.y, shards)


class Divided(list[tuple[Any, Any]]):
    """(x, y) of each client of a data set that was divided, and the indices of the examples of each client."""

    def __init__(self, x: Any, y: Any, indices: list[np.ndarray]) -> None:
        """Divide the examples."""
        super().__init__((x[shard], y[shard]) for shard in indices)
        self.x, self.y, self.indices = x, y, indices


def partitioned(
    x: Any, y: Any, num_clients: int = 100, partition: str = "dirichlet", alpha: float = 0.1, classes: int = 2
) -> Partitioned:
    """Divide a data set among clients.

    Args:
        x: the examples: an array, a torch tensor, or what NumPy makes an array of.
        y: their labels, one for each example: whole numbers, or anything that is a number with the partition iid.
        num_clients: number of clients.
        partition: dirichlet, iid, classes or wkafl; see `afflux compare --help`.
        alpha: Dirichlet's alpha: small means heterogeneous.
        classes: classes of a client, for the partitions classes and wkafl.

    Returns:
        The clients, for `Simulation` and `Task`.

    Raises:
        ConfigError: an unknown partition, another number of labels than examples, a value that is not a finite
            number, or labels that are no classes with a partition by class.
    """
    known("partition", partition, PARTITIONS)
    x, y = as_arrays("partitioned", x, y)
    if len(x) != len(y):
        raise ConfigError(f"there are {len(x)} examples, but {len(y)} labels")
    if num_clients < 1:
        raise ConfigError(f"num_clients is {num_clients}, must be at least 1")
    refuse_nonfinite("partitioned", x)
    if partition != "iid":
        _refuse_other_than_classes(np.asarray(y), partition)
    return Partitioned(x, y, num_clients, partition, classes if partition in BY_CLASSES else alpha)


def _refuse_other_than_classes(labels: np.ndarray, partition: str) -> None:
    if labels.size != len(labels):
        problem = f"has the shape {labels.shape}"
    elif labels.dtype.kind == "f" and (fractional := np.flatnonzero(labels % 1 != 0)).size:
        problem = f"is {labels.flat[fractional[0]]:g} for example {fractional[0]}"
    else:
        return
    raise ConfigError(
        f"partition {partition!r} divides the examples by class, a whole number for each, but y {problem}: "
        'give partition="iid", or a list with the data set of each client'
    )


def positional_parameters(function: Callable[..., Any]) -> int:
    """Return how many arguments without a default a function takes by position."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(parameter.kind in kinds and parameter.default is Parameter.empty for parameter in parameters)


@dataclass(frozen=True)
class ClientTraining:
    """Settings of the clients' training, by the names that `SimConfig` has for them."""

    settings: Mapping[str, Any]


def sgd(
    lr: float = 0.1,
    *,
    steps: int = 3,
    epochs: int = 0,
    batch_size: int = 16,
    weight_decay: float = 0.0,
    steps_law: str = "constant",
    examples: str = "data",
    drop_last: bool = False,
) -> ClientTraining:
    """Return training by mini-batch SGD on the mean loss.

    The data of a client are a pair (x, y) of arrays or torch tensors, or a torch Dataset of such pairs. x may also be a
    tuple or a dict of arrays: the arguments of the model. Items that are dicts, as in a Dataset of Hugging Face, have y
    under the name label or labels, and x under the others.

    Args:
        lr: learning rate.
        steps: mini-batch steps.
        epochs: if not 0, whole epochs instead of steps.
        batch_size: of a mini-batch.
        weight_decay: added to the gradient, times the params.
        steps_law: constant: `steps` each; uniform: drawn from 1 to twice as many.
        examples: the number of examples that a client reports: of its data ("data"), or of a batch ("batch").
        drop_last: whether the last batch of an epoch is left out if it is smaller; a batch of one example has no
            statistics for BatchNorm.

    Returns:
        The training, for `Simulation`.
    """
    settings: dict[str, Any] = {"client_optimizer": "sgd", "client_lr": lr, "local_steps": steps}
    settings |= {"local_epochs": epochs, "batch_size": batch_size, "weight_decay": weight_decay}
    settings |= {"steps_law": steps_law, "examples": examples} | ({"drop_last": drop_last} if drop_last else {})
    return ClientTraining(settings)


def fedprox(lr: float = 0.1, *, mu: float = 0.1, **options: Any) -> ClientTraining:
    """Return training by SGD with the proximal term mu |y - x|^2 / 2, x the pulled model (FedProx, FedAsync).

    Other arguments as for `sgd`.
    """
    return ClientTraining({**sgd(lr, **options).settings, "client_optimizer": "fedprox", "mu": mu})


def scaffold(lr: float = 0.1, *, control_codec: str = "float32", **options: Any) -> ClientTraining:
    """Return training by SGD with SCAFFOLD's control variates, which the server stores in `control_codec`.

    Other arguments as for `sgd`.
    """
    settings = {"client_optimizer": "scaffold", "control_codec": control_codec}
    return ClientTraining({**sgd(lr, **options).settings, **settings})
