"""FADAS (Wang, Wang, Li, Chen and Chen, ICML 2024): Tables 10 and 11."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from afflux.lab.presets.preset import DECIDED, Preset, Sourced, sourced, task_of

PAPER = "FADAS, ICML 2024"
ROUNDS = 500

_RULES = {
    "fedasync": Sourced(
        "fedasync:alpha=0.6:staleness=polynomial(0.5)",
        f"{DECIDED}: FedAsync's own mixing, as the paper gives none but eta = 1",
    ),
    "fedbuff": Sourced(
        "fedbuff:staleness=constant", "section 6: without differential privacy; no weights of staleness"
    ),
    "fadas": Sourced("fadas:beta1=0.9:beta2=0.99:epsilon=1e-8", "Algorithm 1; appendix D.2: betas and epsilon"),
    "da": Sourced(
        "fadas:beta1=0.9:beta2=0.99:epsilon=1e-8:delay_adaptive=inverse:threshold=1",
        "eq. 77; appendix D.2: betas and epsilon; threshold: the authors' code has 1, the tables do not give tau_c",
    ),
}
#: A method's client and server learning rate; None: the rule has no such option.
Rates = Mapping[str, tuple[float, float | None]]
#: Table 10: data, delays, Dirichlet's alpha, FedAsync's client rate. FedAsync's rates differ between rows: the two that
#: are not legible in our copy have no preset.
TABLE_10 = (
    ("cifar10", "mild", 0.1, 0.003),
    ("cifar10", "mild", 0.3, 0.01),
    ("cifar100", "mild", 0.1, 0.01),
    ("cifar100", "mild", 0.3, 0.01),
    ("cifar10", "large", 0.1, 0.003),
    ("cifar10", "large", 0.3, 0.003),
    ("cifar100", "large", 0.1, None),
    ("cifar100", "large", 0.3, None),
)
#: The other rates of Table 10, which are the same in all rows of the same delays.
RATES: Mapping[str, Rates] = {
    "mild": {"fedbuff": (0.03, 1), "fadas": (0.1, 0.0003), "da": (0.1, 0.001)},
    "large": {"fedbuff": (0.03, 1), "fadas": (0.1, 0.0001), "da": (0.1, 0.001)},
}
_BOTH = ("client_lr", "server_lr")
#: Rates of rows of Table 10 (data, alpha) under large delays that are not legible in our copy.
NOT_LEGIBLE: Mapping[tuple[str, float], Mapping[str, tuple[str, ...]]] = {
    ("cifar100", 0.1): {"da": ("client_lr",)},
    ("cifar100", 0.3): {"fedbuff": _BOTH, "fadas": _BOTH, "da": _BOTH},
}
_AS_OTHER_ROWS = f"{DECIDED}; not legible in our copy of Table 10, this is the value of all other rows of these delays"
#: Delays -> all clients, M_c, M (section 6).
SIZES = {"mild": (100, 20, 10), "large": (50, 25, 5)}
#: Data set of GLUE -> method -> rates.
TABLE_11: Mapping[str, Rates] = {
    "rte": {"fedasync": (0.01, None), "fedbuff": (0.01, 1), "fadas": (0.01, 0.005), "da": (0.01, 0.01)},
    "mrpc": {"fedasync": (0.001, None), "fedbuff": (0.01, 1), "fadas": (0.01, 0.001), "da": (0.01, 0.002)},
    "sst2": {"fedasync": (0.001, None), "fedbuff": (0.001, 1), "fadas": (0.1, 0.0005), "da": (0.1, 0.001)},
}
_LORA = (
    f"section 6: BERT base, r and alpha_LoRA; {DECIDED}: 128 tokens, and the classification layer, which BERT's "
    "checkpoint has not, is trained, too"
)


def presets() -> Iterator[Preset]:
    """Yield the presets of the vision tasks, and of the language tasks."""
    for data, delays, alpha, client_lr in TABLE_10:
        task = Sourced(task_of(data, "resnet18-bn"), "section 6: ResNet-18; BatchNorm as in the authors' code")
        clients, concurrency, buffer_size = SIZES[delays]
        settings = {"task": task, **_clients(clients, concurrency, Sourced(alpha, "Table 10"), 2, 50)}
        settings |= sourced("Table 1, gamma = 1", delays=f"fadas-{delays}")
        name = f"fadas-{data}-{delays}" + ("" if alpha == 0.1 else f"-dir{alpha:g}")
        about = f"ResNet-18 on {data}, Dir({alpha:g}), {delays} delays"
        fadas = _fadas(name, about, data, "resnet18-bn", settings, buffer_size)
        decided = NOT_LEGIBLE.get((data, alpha), {}) if delays == "large" else {}
        fedasync: Rates = {} if client_lr is None else {"fedasync": (client_lr, None)}
        for method, rates in {**fedasync, **RATES[delays]}.items():
            sources = (_AS_OTHER_ROWS if rate in decided.get(method, ()) else "Table 10" for rate in _BOTH)
            yield _with_method(fadas, method, rates, *sources)
    for data, methods in TABLE_11.items():
        task = Sourced(f"lora:dataset={data}:checkpoint=bert-base-uncased:rank=1:scale=8:head=true", _LORA)
        settings = {"task": task, **_clients(10, 5, Sourced(0.6, "section 6"), 1, 32)}
        settings |= sourced("Tables 1 and 6, gamma = 1", delays="fadas-mild")
        about = f"LoRA adapters of BERT base on {data}, Dir(0.6), mild delays"
        fadas = _fadas(f"fadas-{data}", about, data, "lora", settings, 3)
        for method, rates in methods.items():
            yield _with_method(fadas, method, rates, "Table 11", "Table 11")


def _clients(clients: int, concurrency: int, alpha: Sourced, epochs: int, batch_size: int) -> dict[str, Sourced]:
    return {
        **sourced("section 6", num_clients=clients),
        **sourced("section 6: M_c", concurrency=concurrency),
        "alpha": alpha,
        **sourced("section 6", local_epochs=epochs, batch_size=batch_size),
    }


def _fadas(name: str, about: str, data: str, model: str, settings: Mapping[str, Sourced], buffer_size: int) -> Preset:
    """Return the preset of FADAS without rates."""
    return Preset(name, PAPER, about, data, model, _RULES["fadas"], settings, Sourced(buffer_size, "section 6: M"))


def _with_method(fadas: Preset, method: str, rates: tuple[float, float | None], *sources: str) -> Preset:
    """Return the preset of a method; the settings are completed by what all tasks of the paper share."""
    assert fadas.buffer_size is not None
    buffer_size, (client_lr, server_lr), alone = fadas.buffer_size.value, rates, method == "fedasync"
    as_many = f"{DECIDED}: as many arrivals as the methods with a buffer have"
    rounds = {
        **sourced("section 6.1: T = 500; of the language tasks not given", rounds=ROUNDS),
        **sourced("the authors' code: M new clients when M have finished", refill=buffer_size),
    }
    shared = {
        **sourced("section 6", partition="dirichlet"),
        **sourced(sources[0], client_lr=client_lr),
        **sourced("section 6", weight_decay=1e-4),
        **sourced("Table 2: mean accuracy of the last 5 rounds, hence each round", eval_every=buffer_size),
        **(sourced(as_many, arrivals=ROUNDS * buffer_size) if alone else rounds),
    }
    return replace(
        fadas,
        name=fadas.name if method == "fadas" else f"{fadas.name}-{method}",
        rule=_RULES[method],
        settings={**fadas.settings, **shared},
        buffer_size=None if alone else fadas.buffer_size,
        server_lr=None if server_lr is None else Sourced(float(server_lr), sources[1]),
    )
