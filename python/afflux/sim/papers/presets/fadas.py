"""FADAS (Wang, Wang, Li, Chen and Chen, ICML 2024): Tables 10 and 11."""

from collections.abc import Iterator, Mapping

from afflux.sim.papers.presets.preset import DECIDED, Preset, Sourced, task_of

PAPER = "FADAS, ICML 2024"
ROUNDS = 500

_RULES = {
    "fedasync": Sourced(
        "fedasync:alpha=0.6:staleness=polynomial(0.5)",
        f"{DECIDED}: FedAsync's own mixing, as the paper gives none beside eta = 1",
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
#: (data, delays, Dirichlet's alpha) -> method -> (client, server learning rate); None: the rule has no such option.
#: Not legible in our copy: `NOT_LEGIBLE`, and FedAsync's rates in the last two rows.
TABLE_10: Mapping[tuple[str, str, float], Mapping[str, tuple[float, float | None]]] = {
    ("cifar10", "mild", 0.1): {
        "fedasync": (0.003, None),
        "fedbuff": (0.03, 1),
        "fadas": (0.1, 0.0003),
        "da": (0.1, 0.001),
    },
    ("cifar10", "mild", 0.3): {
        "fedasync": (0.01, None),
        "fedbuff": (0.03, 1),
        "fadas": (0.1, 0.0003),
        "da": (0.1, 0.001),
    },
    ("cifar100", "mild", 0.1): {
        "fedasync": (0.01, None),
        "fedbuff": (0.03, 1),
        "fadas": (0.1, 0.0003),
        "da": (0.1, 0.001),
    },
    ("cifar100", "mild", 0.3): {
        "fedasync": (0.01, None),
        "fedbuff": (0.03, 1),
        "fadas": (0.1, 0.0003),
        "da": (0.1, 0.001),
    },
    ("cifar10", "large", 0.1): {
        "fedasync": (0.003, None),
        "fedbuff": (0.03, 1),
        "fadas": (0.1, 0.0001),
        "da": (0.1, 0.001),
    },
    ("cifar10", "large", 0.3): {
        "fedasync": (0.003, None),
        "fedbuff": (0.03, 1),
        "fadas": (0.1, 0.0001),
        "da": (0.1, 0.001),
    },
    ("cifar100", "large", 0.1): {"fedbuff": (0.03, 1), "fadas": (0.1, 0.0001), "da": (0.1, 0.001)},
    ("cifar100", "large", 0.3): {"fedbuff": (0.03, 1), "fadas": (0.1, 0.0001), "da": (0.1, 0.001)},
}
_BOTH = ("client_lr", "server_lr")
#: Rates of `TABLE_10` that are not legible in our copy. Each has the value of its column in all other rows of these
#: delays. FedAsync's rates differ between rows: those that are not legible have no preset.
NOT_LEGIBLE: Mapping[tuple[str, str, float], Mapping[str, tuple[str, ...]]] = {
    ("cifar100", "large", 0.1): {"da": ("client_lr",)},
    ("cifar100", "large", 0.3): {"fedbuff": _BOTH, "fadas": _BOTH, "da": _BOTH},
}
_AS_OTHER_ROWS = f"{DECIDED}; not legible in our copy of Table 10, this is the value of all other rows of these delays"
#: Delays -> all clients, M_c, M (section 6).
SIZES = {"mild": (100, 20, 10), "large": (50, 25, 5)}
#: Data set of GLUE -> method -> (client, server learning rate).
TABLE_11: Mapping[str, Mapping[str, tuple[float, float | None]]] = {
    "rte": {"fedasync": (0.01, None), "fedbuff": (0.01, 1), "fadas": (0.01, 0.005), "da": (0.01, 0.01)},
    "mrpc": {"fedasync": (0.001, None), "fedbuff": (0.01, 1), "fadas": (0.01, 0.001), "da": (0.01, 0.002)},
    "sst2": {"fedasync": (0.001, None), "fedbuff": (0.001, 1), "fadas": (0.1, 0.0005), "da": (0.1, 0.001)},
}


def presets() -> Iterator[Preset]:
    """Yield the presets of the vision tasks, and of the language tasks."""
    for (data, delays, alpha), methods in TABLE_10.items():
        clients, concurrency, buffer_size = SIZES[delays]
        for method, (client_lr, server_lr) in methods.items():
            name = f"fadas-{data}-{delays}" + ("" if alpha == 0.1 else f"-dir{alpha:g}")
            settings = {
                "task": Sourced(
                    task_of(data, "resnet18-bn"), "section 6: ResNet-18; BatchNorm as in the authors' code"
                ),
                "num_clients": Sourced(clients, "section 6"),
                "concurrency": Sourced(concurrency, "section 6: M_c"),
                "alpha": Sourced(alpha, "Table 10"),
                "local_epochs": Sourced(2, "section 6"),
                "batch_size": Sourced(50, "section 6"),
                "delays": Sourced(f"fadas-{delays}", "Table 1, gamma = 1"),
            }
            yield preset_of(
                name,
                method,
                f"ResNet-18 on {data}, Dir({alpha:g}), {delays} delays",
                data,
                "resnet18-bn",
                settings,
                *_rates(data, delays, alpha, method, client_lr, server_lr),
                buffer_size,
            )
    for data, by_method in TABLE_11.items():
        for method, (client_lr, server_lr) in by_method.items():
            settings = {
                "task": Sourced(
                    f"lora:dataset={data}:checkpoint=bert-base-uncased:rank=1:scale=8:head=true",
                    f"section 6: BERT base, r and alpha_LoRA; {DECIDED}: 128 tokens, and the classification layer, "
                    "which BERT's checkpoint has not, is trained, too",
                ),
                "num_clients": Sourced(10, "section 6"),
                "concurrency": Sourced(5, "section 6: M_c"),
                "alpha": Sourced(0.6, "section 6"),
                "local_epochs": Sourced(1, "section 6"),
                "batch_size": Sourced(32, "section 6"),
                "delays": Sourced("fadas-mild", "Tables 1 and 6, gamma = 1"),
            }
            about = f"LoRA adapters of BERT base on {data}, Dir(0.6), mild delays"
            rates = Sourced(client_lr, "Table 11"), _server_rate(server_lr, "Table 11")
            yield preset_of(f"fadas-{data}", method, about, data, "lora", settings, *rates, 3)


def _rates(
    data: str, delays: str, alpha: float, method: str, client_lr: float, server_lr: float | None
) -> tuple[Sourced, Sourced | None]:
    decided = NOT_LEGIBLE.get((data, delays, alpha), {}).get(method, ())
    client, server = (_AS_OTHER_ROWS if name in decided else "Table 10" for name in _BOTH)
    return Sourced(client_lr, client), _server_rate(server_lr, server)


def _server_rate(server_lr: float | None, source: str) -> Sourced | None:
    return None if server_lr is None else Sourced(float(server_lr), source)


def preset_of(
    name: str,
    method: str,
    about: str,
    data: str,
    model: str,
    settings: Mapping[str, Sourced],
    client_lr: Sourced,
    server_lr: Sourced | None,
    buffer_size: int,
) -> Preset:
    """Return the preset of a method; `settings` are completed by what all tasks of the paper share."""
    alone = method == "fedasync"
    end = (
        {"arrivals": Sourced(ROUNDS * buffer_size, f"{DECIDED}: as many arrivals as the methods with a buffer have")}
        if alone
        else {
            "rounds": Sourced(ROUNDS, "section 6.1: T = 500; of the language tasks not given"),
            "refill": Sourced(buffer_size, "the authors' code: M new clients when M have finished"),
        }
    )
    shared = {
        "partition": Sourced("dirichlet", "section 6"),
        "client_lr": client_lr,
        "weight_decay": Sourced(1e-4, "section 6"),
        "eval_every": Sourced(buffer_size, "Table 2: mean accuracy of the last 5 rounds, hence each round"),
    }
    return Preset(
        name if method == "fadas" else f"{name}-{method}",
        PAPER,
        about,
        data,
        model,
        _RULES[method],
        dict(settings) | shared | end,
        None if alone else Sourced(buffer_size, "section 6: M"),
        server_lr,
    )
