"""What is simulated: the settings shared by all rules, and one rule with its options."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from math import isfinite
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from afflux.ops import codecs
from afflux.rules.rule import Rule
from afflux.rules.staleness import Constant, Exponential, Hinge, Inverse, Polynomial, StalenessLaw
from afflux.sim.delays import DELAYS
from afflux.sim.errors import ConfigError, known
from afflux.sim.events import PROTOCOLS, SAMPLING
from afflux.sim.local import CLIENT_OPTIMIZERS
from afflux.sim.models import MODELS
from afflux.sim.partitions import BY_CLASSES, PARTITIONS
from afflux.sim.rulefile import maker, split_name
from afflux.sim.tasks import DATASETS

LAWS: dict[str, Callable[..., StalenessLaw]] = {
    "constant": Constant,
    "polynomial": Polynomial,
    "hinge": Hinge,
    "exponential": Exponential,
    "inverse": Inverse,
}

STEPS_LAWS = ("constant", "uniform")
CONTROL_CODECS = tuple(name for name in get_args(codecs.Name) if name != "float64")
EXAMPLES = ("data", "batch")

Plain = int | float | str | bool | None

AT_LEAST = {
    "num_clients": 1,
    "concurrency": 1,
    "refill": 1,
    "arrivals": 1,
    "local_steps": 1,
    "local_epochs": 0,
    "batch_size": 1,
    "eval_every": 1,
    "classes": 1,
    "stale_models": 1,
    "validation": 1,
    "refresh_every": 1,
}


def _setting(default: Any, what: str) -> Any:
    # The command line shows `what`, so that each setting is described in one place.
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class SimConfig:
    """Everything but the rule and the seed; the defaults are the demo's setting."""

    data: str = _setting("digits", f"Data set: {', '.join(DATASETS)}.")
    data_dir: str | None = _setting(None, "Folder of mnist.npz; default: AFFLUX_DATA.")
    model: str = _setting("cnn", f"Model: {', '.join(MODELS)}.")
    num_clients: int = _setting(100, "All clients, N.")
    concurrency: int = _setting(20, "Clients that train at once.")
    refill: int = _setting(
        1, "Start replacements when so many have finished; 1: at once. WKAFL's K-async: K, with all clients at once."
    )
    protocol: str = _setting(
        "events",
        "events: clients finish when their running times say so; rounds: Anarchic FL's, each round as many clients as "
        "the rule's buffer holds, each on one of the last models.",
    )
    stale_models: int = _setting(5, "Protocol rounds: a client starts from one of so many last models; 1: synchronous.")
    sampling: str = _setting("uniform", f"Protocol rounds, who takes part: {', '.join(SAMPLING)} (ten clients).")
    arrivals: int = _setting(1600, "Client results that the server receives before it stops.")
    delays: str = _setting("fadas-large", f"Law of the running times: {', '.join(DELAYS)}.")
    partition: str = _setting("dirichlet", f"Partition of the data: {', '.join(PARTITIONS)}.")
    alpha: float = _setting(0.1, "Dirichlet's alpha: small means heterogeneous.")
    classes: int = _setting(2, f"Classes of a client, for the partitions {', '.join(BY_CLASSES)}.")
    client_optimizer: str = _setting("sgd", f"The clients' optimizer: {', '.join(CLIENT_OPTIMIZERS)}.")
    mu: float = _setting(0.1, "Proximal term of the client optimizers fedprox (its mu) and fedasync (its rho).")
    control_codec: str = _setting(
        "float32", f"How the server stores SCAFFOLD's control variates of clients: {', '.join(CONTROL_CODECS)}."
    )
    client_lr: float = _setting(0.1, "The clients' learning rate.")
    local_steps: int = _setting(3, "Mini-batch steps of a client.")
    steps_law: str = _setting("constant", "constant: so many steps; uniform: drawn from 1 to twice as many.")
    local_epochs: int = _setting(0, "If not 0: whole epochs instead of local steps.")
    batch_size: int = _setting(16, "Mini-batch size of a client.")
    weight_decay: float = _setting(0.0, "The clients' weight decay.")
    examples: str = _setting("data", "Number of examples that a client reports: of its data, or of a batch.")
    validation: int = _setting(64, "Zeno++: training examples, drawn from all, that the server scores updates with.")
    refresh_every: int = _setting(2, "Zeno++: versions between two gradients of these examples.")
    eval_every: int = _setting(40, "Arrivals between two evaluations on the test part.")
    target: float = _setting(0.9, "Test accuracy for the rounds and the time to target.")

    def __post_init__(self) -> None:
        """Check names and ranges; raises ConfigError."""
        known("data", self.data, DATASETS)
        known("model", self.model, MODELS)
        known("delays", self.delays, DELAYS)
        known("partition", self.partition, PARTITIONS)
        known("protocol", self.protocol, PROTOCOLS)
        known("sampling", self.sampling, SAMPLING)
        known("client optimizer", self.client_optimizer, CLIENT_OPTIMIZERS)
        known("codec", self.control_codec, CONTROL_CODECS)
        known("steps law", self.steps_law, STEPS_LAWS)
        known("examples", self.examples, EXAMPLES)
        for name, least in AT_LEAST.items():
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}, must be at least {least}")
        for name in ("alpha", "client_lr"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ConfigError(f"{name} is {value}, must be positive and finite")
        for name in ("weight_decay", "mu"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ConfigError(f"{name} is {value}, must be 0 or more and finite")
        if self.control_codec != "float32" and self.client_optimizer != "scaffold":
            raise ConfigError(f"control_codec is {self.control_codec}, which is for client optimizer scaffold")
        if self.local_epochs and self.steps_law != "constant":
            raise ConfigError(f"steps_law is {self.steps_law}, but the clients train for {self.local_epochs} epochs")
        if not 0 < self.target <= 1:
            raise ConfigError(f"target is {self.target}, must be in (0, 1]")
        if self.protocol == "rounds":
            return  # as many at once as the rule's buffer holds
        if self.sampling != "uniform":
            raise ConfigError(f"sampling is {self.sampling}, which is for protocol rounds")
        if self.refill > self.concurrency:
            raise ConfigError(f"refill is {self.refill}, but {self.concurrency} train at once")
        if self.concurrency > self.num_clients:
            raise ConfigError(f"concurrency is {self.concurrency}, but there are {self.num_clients} clients")

    @property
    def heterogeneity(self) -> float:
        """The number that the partition takes: alpha, or the classes of a client."""
        return self.classes if self.partition in BY_CLASSES else self.alpha


@dataclass(frozen=True)
class RuleSpec:
    """A rule by name with options, as plain data that can go to another process."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    """What a person calls it in tables and pictures."""

    def build(self) -> Rule:
        """Make the rule; raises ConfigError for an unknown name, option or impossible value."""
        options = dict(self.options)
        for option in options:
            known(f"option of {self.name}:", option, parameters(self.name))
        try:
            rule = maker(self.name)(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rule {self.label or self.name}: {error}") from error
        if not isinstance(rule, Rule):
            raise ConfigError(f"rule {self.label or self.name}: it returns {rule!r}, not an afflux.Rule")
        return rule

    def plain_options(self) -> dict[str, Plain]:
        """The options as JSON has them: a law, or inf, as the text that `parse` reads."""
        return {name: value if _in_json(value) else written(value) for name, value in self.options}


def parameters(rule: str) -> Mapping[str, inspect.Parameter]:
    """Return the options that a rule takes; raises ConfigError for an unknown rule."""
    return inspect.signature(maker(rule), eval_str=True).parameters


def parse(text: str, common: Mapping[str, Any] | None = None) -> RuleSpec:
    """Read `name[:option=value...]`; options in `common` apply where the rule takes them.

    The name is a preset's, or `path/to/file.py:function`: then that file is executed.

    >>> parse("fedbuff:server_lr=0.5", {"buffer_size": 4}).options
    (('buffer_size', 4), ('server_lr', 0.5))
    """
    label = text.strip()
    name, assignments = split_name(label)
    _refuse_commas(label, name)
    taken = parameters(name)
    options = {key: value for key, value in (common or {}).items() if key in taken}
    for assignment in assignments:
        option, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"rule {label}: {assignment!r} is not option=value")
        known(f"option of {name}:", option, taken)
        try:
            options[option] = _value(value, taken[option].annotation)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rule {label}: {option}: {error}") from None
    return RuleSpec(name, tuple(sorted(options.items())), label)


def _refuse_commas(label: str, name: str) -> None:
    """Say how options are separated if commas were tried; where rules are, a comma leaves an option as a name."""
    start = len(name) if ".py" in name else 0
    meant = label[:start] + re.sub(r",\s*(?=\w+=)", ":", label[start:])
    if re.match(r"\w+=", name):
        meant = f"NAME:{meant}"
    if meant != label:
        raise ConfigError(f"rule {label}: options are separated by ':', as in {meant}")


def written(value: Any) -> str:
    """Return the text from which `parse` reads this value of an option.

    >>> written(Hinge(10.0, 4.0)), written(None), written(0.5)
    ('hinge(10.0,4.0)', 'none', '0.5')
    """
    for name, law in LAWS.items():
        if type(value) is law:
            arguments = ",".join(map(repr, astuple(value)))
            return f"{name}({arguments})" if arguments else name
    return value if isinstance(value, str) else str(value).lower()


def _in_json(value: Any) -> bool:
    return isinstance(value, Plain) and not (isinstance(value, float) and not isfinite(value))


def _value(text: str, annotation: Any) -> Any:
    named = {written(choice): choice for choice in choices(annotation)}
    if text in named:
        return named[text]
    if StalenessLaw in (annotation, *get_args(annotation)):
        return _law(text)
    for number in (int, float):
        if number is annotation or number in get_args(annotation):
            return number(text)
    raise ValueError(f"{text!r} is not one of {', '.join(named)}")


def choices(annotation: Any) -> list[Any]:
    """Return the values that an annotation lists: ["a", "b", None] of Literal["a", "b"] | None."""
    if annotation in (None, NoneType):
        return [None]
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in choices(part)]


def _law(text: str) -> StalenessLaw:
    name, _, rest = text.removesuffix(")").partition("(")
    known("staleness law", name, LAWS)
    law: StalenessLaw = LAWS[name](*(float(number) for number in rest.split(",") if number))
    return law
