"""The configuration of APPFL's aggregator, `aggregator_kwargs`: the rule, and the settings of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from afflux.aggregation.options import Options
from afflux.integrations._server import keeps_clients
from afflux.integrations._settings import RunSettings, rule_of
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_text, brief, count_of, one_of, optional
from afflux.rules.rule import Rule

#: The names of the values that APPFL's trainers report about a model.
METRICS = ("pre_val_loss", "pre_val_accuracy", "val_loss", "val_accuracy")
#: Settings without a meaning, because APPFL chooses the clients that train.
_NO_SETTINGS = ("dispatch_size", "evaluate_every", "poll_interval", "retry_after", "seed")
#: Options that would change the meaning of the clients' models.
_REFUSED = {
    "gradient_based": "clients send models here: set send_gradient to False",
    "use_secure_agg": "masked models do not add up in an asynchronous run",
}


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A checked configuration."""

    rule: Rule
    settings: RunSettings
    num_clients: int | None
    metrics: tuple[str, ...]
    loss_key: str
    equal_weights: bool  #: whether all clients have equal weights, for any number of examples
    model_configs: Any


def aggregation_of(config: Any) -> Aggregation:
    """Read a configuration.

    Raises:
        AffluxError: an option is unknown, has a wrong type or value, or is supported by no rule of afflux.
    """
    given = _plain(config)
    for name, why in _REFUSED.items():
        if given.pop(name, False) is not False:
            raise AffluxError(f"[appfl] {name}: {why}")
    given.pop("optimize_memory", None)  # an option of APPFL's own aggregators
    settings, given = RunSettings.split(given, without=_NO_SETTINGS)
    num_clients = optional(count_of(1))("appfl", "num_clients", given.pop("num_clients", None))
    metrics = given.pop("metrics", METRICS)
    if not isinstance(metrics, list | tuple) or not all(as_text(name) for name in metrics):
        raise AffluxError(f"[appfl] metrics is {brief(metrics)}, must be a list of names")
    loss_key, model_configs = given.pop("loss_key", "val_loss"), given.pop("model_configs", None)
    weights = one_of(None, "equal", "sample_size")("appfl", "client_weights_mode", given.get("client_weights_mode"))
    if given.get("dialect") != "appfl":  # the dialect "appfl" has an option of this name
        given.pop("client_weights_mode", None)
    rule = rule_of("appfl", given.pop("rule", "fedbuff"), given, num_clients)
    if keeps_clients(rule) and num_clients is not None:
        clients: Options = {"num_clients": num_clients}
        settings = replace(settings, server_options={**clients, **settings.server_options})
    if keeps_clients(rule) and settings.server_options.get("num_clients") is None:
        raise AffluxError(f"[appfl] num_clients is missing: {rule.name} keeps something for each client")
    if rule.kind == "gradient" and settings.client_lr is None:
        raise AffluxError(f"[appfl] client_lr is missing: {rule.name} takes gradients, and APPFL's clients send models")
    return Aggregation(rule, settings, num_clients, tuple(metrics), str(loss_key), weights == "equal", model_configs)


def model_of(config: Any) -> Any:
    """Make the model that APPFL's `model_configs` describe.

    Raises:
        AffluxError: there are none, or they describe no model.
    """
    import torch
    from appfl.misc.utils import create_instance_from_file, run_function_from_file

    if not isinstance(config, Mapping) or "model_path" not in config:
        raise AffluxError(
            "[appfl] there is no model: APPFL passes none to an aggregator that aggregator_path names. Give "
            "model_configs in aggregator_kwargs, as in client_configs"
        )
    make = create_instance_from_file if "model_name" in config else run_function_from_file
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.get("seed", 42))  # as APPFL's ServerAgent does
        model = make(config["model_path"], config.get("model_name"), **config.get("model_kwargs") or {})
    if model is None:
        raise AffluxError(f"[appfl] model_configs: {config['model_path']} gives no model")
    return model


def _plain(config: Any) -> dict[str, Any]:
    """Return a configuration of OmegaConf, or a mapping, as a new dict."""
    from omegaconf import DictConfig, OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    plain = {} if plain is None else plain
    if not isinstance(plain, Mapping) or not all(isinstance(name, str) for name in plain):
        raise AffluxError(f"[appfl] aggregator_configs is {brief(config)}, must be a mapping from names")
    return dict(plain)
