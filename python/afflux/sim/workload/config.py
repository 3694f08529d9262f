"""The settings of a simulation, without the rule and the seed."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from math import inf, isfinite
from os import PathLike, fspath
from typing import Annotated, Any, get_args

from msgspec import Meta

from afflux.ops import codecs
from afflux.ops.errors import ConfigError
from afflux.ops.validation import as_float, as_int, as_text, brief, known
from afflux.sim.data import DATA_SETS
from afflux.sim.models import MODELS
from afflux.sim.workload.attacks import ATTACKS, attack_law
from afflux.sim.workload.availability import (
    ALWAYS,
    AVAILABILITIES,
    NONE,
    availability_law,
    check_finite,
    check_positive,
    check_range,
    dropout_law,
)
from afflux.sim.workload.delays import DELAYS, DELAYS_OF_TASK, delay_law
from afflux.sim.workload.evaluation import Metric
from afflux.sim.workload.partitions import BY_CLASSES, PARTITIONS
from afflux.sim.workload.selection import selection_law

#: A number in a file.
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: The task of the settings data, model and partition.
IMAGES = "images"
#: The task of the papers' data sets and models.
PAPERS = "papers"
#: The task of GLUE's data sets and a transformer's adapters.
LORA = "lora"
#: Prefix of the names of tasks that were made in Python, which no setting can make again.
MADE_IN_PYTHON = "python"
#: Settings that may end a run before its last arrival.
ENDS = ("rounds", "virtual_time", "stop_at_target")
#: The number of arrivals of a run that another setting ends: more than a run can have.
UNLIMITED = 2**62
#: Settings that only the task of images has.
OF_IMAGES = ("data", "data_dir", "model", "partition", "alpha", "classes")
#: Settings of clients that come and go.
OF_PRESENCE = ("availability", "dropout", "timeout")
#: Settings that no function of the user reads, but only the simulator.
OF_SIMULATOR = (
    *("data", "model", "concurrency", "refill", "selection", *OF_PRESENCE, "attack", "stale_models", "sampling"),
)
#: Probabilities with which clients take part in a round: Anarchic FL's two laws; the second is for ten workers.
SAMPLING: dict[str, tuple[float, ...] | None] = {
    "uniform": None,
    "biased": (0.19, 0.19, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01),
}

#: The client optimizers with a proximal term, which read mu.
PROXIMAL = ("fedprox", "fedasync")
CONTROL_CODECS = tuple(name for name in get_args(codecs.Name) if name != "float64")
#: Settings of the evaluation of single clients.
OF_CLIENTS = ("fairness_every", "fairness_clients")
DEVICES = ("cpu", "cuda")
#: Settings that are recorded only if they are changed. A table finds its lines in docs/results by what is recorded.
RECORDED_IF_CHANGED = (
    *("task", "part", "compile", "device", "clip_norms", "faults", "drop_last", "selection"),
    *("attack", *OF_CLIENTS, *OF_PRESENCE),
)

#: The largest float32; clients train in float32.
MOST_FLOAT32 = 3.4028234e38
#: The most clients of the task of images, which holds a list of examples for each client; other tasks may have more.
MOST_CLIENTS = 100_000
#: The settings that are 1 or more, and those that are 0 or more.
FROM_1 = (
    *("num_clients", "refill", "arrivals", "local_steps", "batch_size", "eval_every", "classes"),
    *("stale_models", "validation", "refresh_every", "fairness_clients"),
)
FROM_0 = ("local_epochs", "rounds", "virtual_time", "fairness_every", "timeout")


def _number_or_text(value: Any) -> int | str | None:
    text = as_text(value)
    return as_int(value) if text is None else int(text) if text.isdecimal() else text


#: What a setting of a type must be, and the value that is recorded of it; None: it is something else.
_TYPES: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    int: ("a whole number", as_int),
    int | str: ("a whole number, or steps such as 20:50@100", _number_or_text),
    float: ("a number", lambda value: value if type(value) is int else as_float(value)),
    bool: ("True or False", lambda value: bool(value) if type(value).__name__ in ("bool", "bool_") else None),
    str: ("a string", as_text),
    str | None: ("a string or a path", lambda value: as_text(fspath(value) if isinstance(value, PathLike) else value)),
}


def _setting(default: Any, description: str, *names: str) -> Any:
    # The command line shows `description` as help: each setting is described in one place. Behind a colon, the names
    # follow that the setting may have.
    text = f"{description} {', '.join(names)}." if description.endswith(":") else description
    return field(default=default, metadata={"help": text, "names": names})


def unlimit_arrivals(settings: dict[str, Any], is_given: bool) -> None:
    """Let the arrivals, if they are not given, have no limit if another end is given alone."""
    if not is_given and any(settings.get(end) for end in ENDS):
        settings["arrivals"] = UNLIMITED


def concurrency_steps(concurrency: int | str) -> list[tuple[float, int]]:
    """Return the virtual times from which so many clients train at once, in ascending order; the first one is 0.

    >>> concurrency_steps("20:50@100")
    [(0.0, 20), (100.0, 50)]

    Raises:
        ConfigError: no such text, or a number below 1.
    """
    first, *later = str(concurrency).split(":")
    try:
        pairs = [(float(time), int(count)) for count, time in (text.split("@") for text in later)]
        steps = [(0.0, int(first)), *pairs]
    except ValueError:
        raise ConfigError(f"concurrency is {brief(concurrency)}, must be {_TYPES[int | str][0]}") from None
    if (least := min(count for _, count in steps)) < 1:
        raise ConfigError(f"concurrency is {least}, must be at least 1")
    if not all(a < b for (a, _), (b, _) in pairwise((*steps, (inf, 0)))):
        raise ConfigError(f"concurrency is {concurrency}, but its times must be finite and ascend from 0")
    return steps


def unread_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that runs with the others do not read, by name, and what would read them.

    These are the rules of the built-in tasks and trainings; a function of the user may read other settings.
    """
    images, events = settings["task"] == IMAGES, settings["protocol"] == "events"
    partition, optimizer = settings["partition"], settings["client_optimizer"]
    table = {
        f"task {IMAGES}": () if images else ("data", "model"),
        "a task with evaluate_client=": OF_CLIENTS if images else (),
        "data from files": ("data_dir",) if images and settings["data"] == "digits" else (),
        "protocol events": () if events else ("concurrency", "refill", "selection", *OF_PRESENCE),
        "protocol rounds": ("stale_models", "sampling") if events else (),
        "partition dirichlet": () if partition == "dirichlet" else ("alpha",),
        f"partition {' or '.join(BY_CLASSES)}": () if partition in BY_CLASSES else ("classes",),
        f"client_optimizer {' or '.join(PROXIMAL)}": () if optimizer in PROXIMAL else ("mu",),
        "client_optimizer scaffold": () if optimizer == "scaffold" else ("control_codec",),
        "local_epochs 0": ("local_steps", "steps_law") if settings["local_epochs"] else (),
    }
    return {name: reader for reader, names in table.items() for name in names}


@dataclass(frozen=True)
class SimConfig:
    """All settings without the rule and the seed; the defaults are those of the demo."""

    task: str = _setting(
        IMAGES,
        f"What clients train: {IMAGES}, which is --data, --model and --partition; {PAPERS}:dataset=NAME:network=NAME "
        f"(docs/reference/data.md); {LORA}:dataset=NAME:checkpoint=FOLDER (docs/reference/presets.md); or path/to/"
        "file.py:FUNCTION, which is executed and returns an afflux.sim.Task.",
    )
    data: str = _setting("digits", "Data set:", *DATA_SETS)
    data_dir: str | None = _setting(None, "Folder of the data sets (docs/reference/data.md); default: AFFLUX_DATA.")
    model: str = _setting("cnn", "Model:", *MODELS)
    num_clients: int = _setting(100, "All clients, N.")
    concurrency: int | str = _setting(20, "Clients that train at once; 20:50@100: 20, from virtual time 100 on 50.")
    refill: int = _setting(
        1, "Start replacements when so many have finished; 1: at once. WKAFL's K-async: K, with all clients at once."
    )
    selection: str = _setting(
        "uniform",
        "Protocol events, the client that starts next: uniform, any that is idle; blocked-until-pass-ends, any that "
        "has not finished yet in this pass over all clients (GSGM); examples, by their numbers of examples; or "
        "path/to/file.py:FUNCTION, which is executed (docs/reference/simulation.md).",
    )
    availability: str = _setting(
        ALWAYS,
        f"Protocol events, when clients are there: {ALWAYS}, {', '.join(AVAILABILITIES)}, with options as in "
        "diurnal:period=24:share=0.3 (docs/reference/simulation.md). A client trains only while it is there.",
    )
    dropout: str = _setting(
        NONE,
        f"Protocol events, clients that drop out: {NONE}; or rates:never=0.1:upload=0.05:late=0.2:slower=10, shares of "
        "the dispatches that never finish, lose their upload, or take so many times as long.",
    )
    timeout: float = _setting(
        0.0, "If not 0: the server gives a dispatch up after so much virtual time, and its place to another client."
    )
    protocol: str = _setting(
        "events",
        "events: clients finish after their running times; rounds: Anarchic FL's protocol, with as many clients in a "
        "round as the rule's buffer holds, each on one of the last models.",
        *("events", "rounds"),
    )
    stale_models: int = _setting(5, "Protocol rounds: a client starts from one of so many last models; 1: synchronous.")
    sampling: str = _setting("uniform", "Protocol rounds, draw of clients; biased is for ten:", *SAMPLING)
    arrivals: int = _setting(
        1600, "Client results that the server receives before it stops; without limit if another end is given alone."
    )
    rounds: int = _setting(
        0,
        "If not 0: stop after the arrival with which the server has made so many steps.",
    )
    virtual_time: float = _setting(0.0, "If not 0: stop before the first result that arrives later.")
    stop_at_target: bool = _setting(False, "Stop at the first evaluation that reaches the target.")
    delays: str = _setting(
        "fadas-large",
        f"Distribution of the running times: {', '.join(DELAYS)}, with options as in fadas-large:gamma=0.5 "
        "(docs/reference/data.md); task: the one of your own task, which is the default if it has one.",
    )
    partition: str = _setting("dirichlet", "Partition of the data:", *PARTITIONS)
    alpha: float = _setting(0.1, "Dirichlet's alpha: small means heterogeneous.")
    classes: int = _setting(2, f"Classes of a client, for the partitions {', '.join(BY_CLASSES)}.")
    client_optimizer: str = _setting("sgd", "The clients' optimizer:", "sgd", *PROXIMAL, "scaffold")
    mu: float = _setting(0.1, "Proximal term of the client optimizers fedprox (its mu) and fedasync (its rho).")
    control_codec: str = _setting(
        "float32", "How the server stores SCAFFOLD's control variates of clients:", *CONTROL_CODECS
    )
    client_lr: float = _setting(0.1, "The clients' learning rate.")
    local_steps: int = _setting(3, "Mini-batch steps of a client.")
    steps_law: str = _setting(
        "constant", "constant: local_steps each; uniform: drawn from 1 to twice as many.", "constant", "uniform"
    )
    local_epochs: int = _setting(0, "If not 0: whole epochs instead of local steps.")
    batch_size: int = _setting(16, "Mini-batch size of a client.")
    drop_last: bool = _setting(
        False,
        "Leave out the last batch of an epoch if it is smaller, except if it is the only one.",
    )
    weight_decay: float = _setting(0.0, "The clients' weight decay.")
    compile: bool = _setting(
        False,
        "Compile the clients' steps on full batches to native code, which takes 8 s and more in each process; needs a "
        "C++ compiler. The last bits of the results differ from those without it. On a GPU: launch the kernels of such "
        "a step together, as a CUDA graph; the built-in tasks do so without this setting, too.",
    )
    device: str = _setting(
        "cpu",
        "Device on which clients train and models are evaluated, one client at a time: cpu, cuda or cuda:NUMBER. A "
        "task of your own moves its data there itself. The results differ in the last bits from those of the CPU.",
    )
    faults: str = _setting(
        "record",
        "A client's training that raises an exception, or whose loss or update is not finite: record it as a faulty "
        "arrival, which the audit log holds with its reason; or raise, which ends the run.",
        *("record", "raise"),
    )
    examples: str = _setting(
        "data", "Number of examples that a client reports, of its data or a batch:", "data", "batch"
    )
    attack: str = _setting(
        NONE, f"Hostile clients: {NONE}, {', '.join(ATTACKS)}, as in scaled:clients=20 (docs/reference/simulation.md)."
    )
    clip_norms: float = _setting(
        0.0, "If not 0: the server reduces the weight of an update whose norm exceeds so many medians."
    )
    validation: int = _setting(64, "zenopp, aflguard, fltrust: training examples by which the server scores updates.")
    refresh_every: int = _setting(2, "Versions between two gradients of these examples.")
    eval_every: int = _setting(40, "Arrivals between two evaluations on the test part.")
    fairness_every: int = _setting(
        0,
        "Arrivals between two evaluations of single clients, of a task of your own that has one; 0: only at the end.",
    )
    fairness_clients: int = _setting(100, "The most clients, drawn once, that are evaluated each.")
    part: str = _setting(
        "test",
        "Examples of the evaluations: test; or validation, a fifth of the training part, which no client has then.",
        *("test", "validation"),
    )
    target: float = _setting(
        0.9, "Test accuracy, or first metric of your own task, for the rounds and the time to target."
    )

    def __post_init__(self) -> None:
        """Raise ConfigError if a name or a value is invalid; numbers of NumPy become those of Python."""
        for setting in fields(self):
            (words, read), value = _TYPES[setting.type], getattr(self, setting.name)
            if (plain := read(value)) is None and value is not setting.default:
                raise ConfigError(f"{setting.name} is {brief(value)}, must be {words}")
            object.__setattr__(self, setting.name, plain)
            if names := setting.metadata["names"]:
                known(setting.name.replace("_", " "), getattr(self, setting.name), names)
        if self.task == IMAGES or self.delays != DELAYS_OF_TASK:
            delay_law(self.delays)
        selection_law(self.selection)
        availability_law(self.availability)
        dropout_law(self.dropout)
        attack_law(self.attack)
        steps = concurrency_steps(self.concurrency)
        known("device", re.sub(r"(?<=cuda):(0|[1-9][0-9]?)\Z", "", self.device), DEVICES)
        for least, names in enumerate((FROM_0, FROM_1)):
            check_range(self, least, inf, *names, words=f"at least {least}")
        if not self.task.isprintable() or not self.task:
            raise ConfigError(f"task is {brief(self.task)}, must be a name or FILE.py:FUNCTION")
        if self.task == IMAGES and self.num_clients > MOST_CLIENTS:
            raise ConfigError(f"num_clients is {self.num_clients}, must be at most {MOST_CLIENTS}")
        check_positive(self, "alpha", "client_lr")
        check_finite(self, "weight_decay", "mu", "clip_norms", "virtual_time", "timeout")
        words = f"at most {MOST_FLOAT32}, the largest float32"
        check_range(self, 0, MOST_FLOAT32, "client_lr", "weight_decay", "mu", words=words)
        self.refuse_unread(self.changed())
        if self.arrivals >= UNLIMITED and not any(getattr(self, end) for end in ENDS):
            raise ConfigError("the run has no end: give arrivals, rounds, virtual_time or stop_at_target")
        if not (0 < self.target <= 1 if self._built_in else isfinite(self.target)):
            range_ = "in (0, 1]" if self._built_in else "finite"
            raise ConfigError(f"target is {self.target}, must be {range_}")
        counts = [count for _, count in steps]
        if self.protocol == "rounds":
            return  # concurrency is the size of the rule's buffer
        if self.refill > min(counts):
            raise ConfigError(f"refill is {self.refill}, but {self.concurrency} train at once")
        if self.task == IMAGES and max(counts) > self.num_clients:
            raise ConfigError(f"concurrency is {self.concurrency}, but there are {self.num_clients} clients")

    def refuse_unread(self, names: Iterable[str]) -> None:
        """Raise ConfigError if no run reads one of these settings; a function of the user may read those of its task.

        A setting that has its default is in `names` only if it was given.
        """
        self.refuse((name for name in names if self._built_in or name in OF_SIMULATOR), unread_settings(asdict(self)))

    def refuse(self, names: Iterable[str], unread: Mapping[str, str]) -> None:
        """Raise ConfigError if one of these settings is in `unread`: the settings that no run reads, and what would."""
        for name in names:
            if name in unread:
                raise ConfigError(f"{name} is {getattr(self, name)}, which is read only with {unread[name]}")

    def is_reached(self, arrivals: int, version: int, score: float, metric: Metric) -> bool:
        """Return whether a run ends after these arrivals and rounds, with this score at its last evaluation."""
        is_target = self.stop_at_target and metric.reaches(score, self.target)
        return arrivals >= self.arrivals or 0 < self.rounds <= version or is_target

    def check_unit(self, score: float, metric: Metric) -> None:
        """Raise ConfigError if a score reaches the target only because it has another unit, such as per cent."""
        if metric.reaches(score, self.target) and metric.is_in_unit(self.target) and not metric.is_in_unit(score):
            range_ = "a share, from 0 to 1" if metric.is_share else "from {:g} to {:g}".format(*metric.bounds)
            raise ConfigError(
                f"the {metric.words} of an evaluation is {score:g}, but it is declared as {range_}, as the target "
                f"{self.target:g} is: return such a number, or give the target in the same unit"
            )

    @property
    def _built_in(self) -> bool:
        return self.task.partition(":")[0] in (IMAGES, PAPERS, LORA)

    def recorded(self) -> dict[str, Any]:
        """Return the settings for logs and tables; some, as `RECORDED_IF_CHANGED`, only if they are changed."""
        optional = (*RECORDED_IF_CHANGED, *ENDS, *(OF_IMAGES if self.task != IMAGES else ()))
        unused = {*optional}.difference(self.changed())
        return {name: value for name, value in asdict(self).items() if name not in unused}

    def changed(self) -> list[str]:
        """Return the names of the settings that differ from their defaults."""
        return [setting.name for setting in fields(self) if getattr(self, setting.name) != setting.default]

    @property
    def heterogeneity(self) -> float:
        """The number that the partition takes: alpha, or the classes of a client."""
        return self.classes if self.partition in BY_CLASSES else self.alpha


SETTINGS = tuple(field.name for field in fields(SimConfig))


def keyword_settings(function: Callable[..., Any] | None) -> list[str]:
    """Return the settings that a training function takes as keyword-only parameters; [] if there is no function."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    return [name for name in SETTINGS if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
