"""The names of rules' options in other frameworks; `rules.make` accepts them together with `dialect=`."""

from collections.abc import Callable, Container, Mapping
from math import inf

from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, count_of, flag, integer, one_or_less
from afflux.rules.presets.fedmedian import fedtrimmedavg

NamedOptions = dict[str, object]

#: {dialect: {name in the framework: name in afflux}}; None: not an option of a rule; only its default is accepted.
FRAMEWORK_NAMES: Mapping[str, Mapping[str, str | None]] = {
    "appfl": {
        "K": "buffer_size",
        "alpha": "server_lr",
        "staleness_fn": "staleness",
        "staleness_fn_kwargs": "staleness",
        "client_weights_mode": None,
        "gradient_based": None,
    },
    "nvflare": {
        "num_updates_for_model": "buffer_size",
        "global_lr": "server_lr",
        "staleness_weight": "staleness",
        "max_model_history": None,
    },
    "flgo": {"buffer_ratio": "buffer_size", "eta": "server_lr"},
    "flower": {
        "server_learning_rate": "server_lr",
        "server_momentum": "beta",
        "num_malicious_nodes": "byzantine",
        "num_nodes_to_select": "keep",
        "beta": "trim",
        "clipping_norm": "clip",
    },
}
#: The rules that Flower has, too: its dialect is for these, all others are FedBuff's.
RULES_OF_FLOWER = ("fedavgm", "krum", "multi_krum", "fedmedian", "fedtrimmedavg", "dp_fedbuff")
#: The names that have a meaning only in the dialect of their framework.
ONLY_IN_DIALECT = ("client_weights_mode", "gradient_based", "staleness_weight", "max_model_history")


def in_our_names(dialect: str, options: Mapping[str, object], ours: Container[str] = ()) -> NamedOptions:
    """Return the options of a rule, with the names of a framework replaced by afflux's, except those in `ours`.

    Raises:
        AffluxError: both names of an option are given, or a value has no counterpart in a rule.
    """
    names = {name: key for name, key in FRAMEWORK_NAMES.get(dialect, {}).items() if name not in ours}
    preset_options = dict(options)
    framework_options: NamedOptions = {name: preset_options.pop(name) for name in names if name in preset_options}
    for name in framework_options:
        key = names[name]
        if key is not None and key in preset_options:
            raise AffluxError(f"[make] {name} is the name of {key} in {dialect}: both are given, must be one of them")
    for name, value in framework_options.items():
        if name in _CONVERTED:
            _CONVERTED[name](preset_options, framework_options)
        elif (key := names[name]) is not None:
            preset_options[key] = value
    return preset_options


def _law(preset_options: NamedOptions, framework_options: NamedOptions) -> None:
    """Convert APPFL's law of staleness: its name and, separately, its options."""
    if "staleness_fn" not in framework_options:
        raise AffluxError("[make] staleness_fn_kwargs is given without staleness_fn")
    options = framework_options.get("staleness_fn_kwargs")
    if not (options is None or isinstance(options, Mapping)):
        raise AffluxError(f"[make] staleness_fn_kwargs is {brief(options)}, must be a mapping")
    preset_options["staleness"] = {**(options or {}), "part": framework_options["staleness_fn"]}


def _switch(preset_options: NamedOptions, framework_options: NamedOptions) -> None:
    """Convert NVFlare's switch: true is the dialect's own law, false is no law."""
    if not flag("make", "staleness_weight", framework_options["staleness_weight"]):
        preset_options["staleness"] = "constant"


def _share(preset_options: NamedOptions, framework_options: NamedOptions) -> None:
    """Convert FLGo's buffer, which holds a share of all clients, into a number of arrivals."""
    ratio = one_or_less("make", "buffer_ratio", framework_options["buffer_ratio"])
    if "num_clients" not in preset_options:
        raise AffluxError("[make] num_clients is missing: buffer_ratio is a share of all clients")
    clients = integer(1)("make", "num_clients", preset_options.pop("num_clients"))
    if clients >= 2**63:
        raise AffluxError("[make] num_clients must fit into 64 bits")
    preset_options["buffer_size"] = int(ratio * clients)


def _whole_values(preset_options: NamedOptions, framework_options: NamedOptions) -> None:
    """Convert the share that Flower's FedTrimmedAvg cuts at each end: int(beta M) values."""
    share = one_or_less("make", "beta", framework_options["beta"])
    default = fedtrimmedavg().buffer_size
    size = count_of(1)("make", "buffer_size", preset_options.get("buffer_size", default))
    preset_options["trim"] = int(share * size) / size


def _only(name: str, default: object, instead: str) -> Callable[[NamedOptions, NamedOptions], None]:
    def check(preset_options: NamedOptions, framework_options: NamedOptions) -> None:
        value = framework_options[name]
        if type(value) not in (type(default), str) or str(value) != str(default):  # JSON has inf as text
            raise AffluxError(f"[make] {name} is {brief(value)}, must be {default!r}: {instead}")

    return check


_CONVERTED: Mapping[str, Callable[[NamedOptions, NamedOptions], None]] = {
    "staleness_fn": _law,
    "staleness_fn_kwargs": _law,
    "staleness_weight": _switch,
    "buffer_ratio": _share,
    "beta": _whole_values,
    "client_weights_mode": _only("client_weights_mode", "equal", "afflux has no weights by examples in this dialect"),
    "gradient_based": _only("gradient_based", False, "clients push models in this dialect"),
    "max_model_history": _only("max_model_history", inf, "give it to Server, as max_staleness=max_model_history - 1"),
}
