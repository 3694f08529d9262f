"""The settings of a run that all adapters share, as one frozen, checked object; and the rule of a configuration."""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Self

from afflux.aggregation.options import Options, options_of
from afflux.arrays.roles import Roles
from afflux.ops.errors import AffluxError
from afflux.ops.validation import (
    a_thread_count,
    brief,
    check_fields,
    count_of,
    instance,
    integer,
    not_negative,
    optional,
    path_of,
    positive,
)
from afflux.rules import RULES, from_config, make
from afflux.rules.presets.framework_names import ONLY_IN_DIALECT, in_our_names
from afflux.rules.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, which are the same for all frameworks.

    Args:
        concurrency: number of clients that train at the same time; None: all that are connected when the run starts.
        dispatch_size: number of free places from which on clients get tasks: 1 fills each place at once; with M and
            the concurrency, each step takes replies of one version.
        timeout: seconds after which another client trains instead of one that has not replied, and a later reply has
            no effect, without those in steps, in commits and in the user's functions; None: the framework's value, or
            an hour if it has none.
        store: a folder for the server's state; if it holds a server, the run continues from it. Then roles and
            server_options that are not given are those of the store, and given ones that differ replace them, with a
            warning, or are an error that names both values (see `Server.open`). None: in memory.
        checkpoint_every: steps after which the open assignments, waiting arrivals and the history are stored, too.
        evaluate_every: steps between evaluations.
        max_failures: consecutive failures of a client (errors, refused replies, no reply) after which it counts as
            failed. The run raises an error when all clients have failed; until then each client is tried again.
        retry_after: seconds that a client rests after a failure, or the time until its failure if that is longer; twice
            as long after each further consecutive failure, up to 1024 times.
        poll_interval: seconds between two checks for replies while there are none.
        seed: seed of the choice of clients.
        num_threads: threads of a step; None: all CPUs that this process may use.
        client_lr: learning rate of the clients, for rules that take gradients; a value in a reply replaces it.
        local_steps: number of local steps of the clients, in the same way.
        roles: the roles of arrays by patterns of names, such as {"bn.*": "local"}; see `Layout.of`.
        server_options: fields of `afflux.ServerOptions`, such as max_staleness. faults="raise" is not allowed, because
            an invalid reply would end the run; inplace=True is not allowed, because replies are models, whose
            conversion needs the version that the client pulled.
        noise_key_file: a file of 32 secret random bytes, the `noise_key` of a rule that adds noise.

    Raises:
        AffluxError: a setting has a wrong type or value.
    """

    concurrency: int | None = None
    dispatch_size: int = 1
    timeout: float | None = None
    store: "str | PathLike[str] | None" = None
    checkpoint_every: int = 10
    evaluate_every: int = 1
    max_failures: int = 5
    retry_after: float = 0.5
    poll_interval: float = 0.05
    seed: int = 0
    num_threads: int | None = None
    client_lr: float | None = None
    local_steps: int | None = None
    roles: Roles | None = None
    server_options: Options = field(default_factory=lambda: Options())
    noise_key_file: "str | PathLike[str] | None" = None

    def __post_init__(self) -> None:
        count = count_of(1)
        check_fields(self, count, "checkpoint_every", "dispatch_size", "evaluate_every", "max_failures", op="settings")
        check_fields(self, optional(count), "concurrency", "local_steps", op="settings")
        if self.concurrency is not None and self.dispatch_size > self.concurrency:
            most = f"must be at most concurrency, {self.concurrency}"
            raise AffluxError(f"[settings] dispatch_size is {self.dispatch_size}, {most}")
        check_fields(self, optional(positive), "timeout", "client_lr", op="settings")
        check_fields(self, not_negative, "poll_interval", "retry_after", op="settings")
        check_fields(self, integer(0), "seed", op="settings")
        check_fields(self, optional(a_thread_count), "num_threads", op="settings")
        check_fields(self, optional(path_of), "store", "noise_key_file", op="settings")
        check_fields(self, instance(dict, "a dict of fields of ServerOptions"), "server_options", op="settings")
        check_fields(self, optional(instance(dict, "a dict of roles by patterns of names")), "roles", op="settings")
        options_of("settings.server_options", None, self.server_options)
        refuse_options(self.server_options.get("faults", "record"), self.server_options.get("inplace", False))

    @classmethod
    def split(cls, given: Mapping[str, Any], without: Collection[str] = ()) -> tuple[Self, dict[str, Any]]:
        """Divide keyword arguments into settings, except those in `without`, and other arguments."""
        others = dict(given)
        names = ({each.name for each in fields(cls)} & others.keys()).difference(without)
        return cls(**{name: others.pop(name) for name in names}), others


def is_due(every: int, before: int, step: int) -> bool:
    """Return whether one of the steps after `before`, up to `step`, is a multiple of `every`."""
    return step // every > before // every


def require_absolute_store(operation: str, settings: RunSettings, why: str) -> None:
    """Raise an error for a store whose path depends on the folder in which the framework starts the server."""
    if settings.store is not None and not Path(settings.store).is_absolute():
        raise AffluxError(f"[{operation}] store is {brief(str(settings.store))}, must be an absolute path: {why}")


def refuse_options(faults: str, inplace: bool) -> None:
    """Raise an error for server options that no adapter supports."""
    if faults != "record":
        raise AffluxError(f'[settings] a server with faults="{faults}" would end the run for one client\'s fault')
    if inplace:
        raise AffluxError(
            "[settings] a server with inplace=True overwrites the version that a client trains from, and replies are "
            "models, which need it"
        )


def rule_of(framework: str, rule: object, options: Mapping[str, Any], num_clients: int | None = None) -> Rule:
    """Make the rule of a framework's configuration.

    Args:
        framework: a key of `FRAMEWORK_NAMES`, or the name of a caller without names of its own.
        rule: a rule, the name of a rule, its text `name:option=value:...`, its options with its "name", or the result
            of `Rule.to_config`.
        options: the options of the rule with this name, by afflux's names or the framework's. If both use a name, such
            as alpha in "fedasync" and in APPFL, the name is afflux's.
        num_clients: for options that are shares of all clients, and for the framework's dialect.

    Raises:
        AffluxError: `rule` is not a rule; an option is unknown, has a wrong type or value, or is given twice.
    """
    pairs = [*options.items()]
    if isinstance(rule, Mapping) and "name" in rule and "part" not in rule:
        pairs += [(option, value) for option, value in rule.items() if option != "name"]
        rule = rule["name"]
    if not isinstance(rule, str):
        if not (isinstance(rule, Rule) or (isinstance(rule, Mapping) and "part" in rule)):
            words = "must be a Rule, its name and options, or a Rule.to_config()"
            raise AffluxError(f"[{framework}] rule is {brief(rule)}, {words}")
        if pairs:
            raise AffluxError(
                f"[{framework}] {brief([name for name, _ in pairs])}: a rule that is given whole has its options inside"
            )
        return rule if isinstance(rule, Rule) else from_config(rule)
    rule, *assignments = rule.split(":")
    pairs += [(option, _value_of(text)) for option, _, text in (one.partition("=") for one in assignments)]
    values = dict(pairs)
    if len(values) < len(pairs):
        raise AffluxError(f"[{framework}] an option of {rule} is given twice: {brief([name for name, _ in pairs])}")
    own = signature(RULES[rule]).parameters if rule in RULES else {}
    if num_clients is not None and ("buffer_ratio" in values or values.get("dialect") == "appfl"):
        values.setdefault("num_clients", num_clients)
    if "dialect" in own and values.get("dialect") == framework:
        return make(rule, **values)
    return make(rule, **in_our_names(framework, values, {*own, *ONLY_IN_DIALECT}))


def _value_of(text: str) -> Any:
    """Return the number or the boolean of a text, or the text itself."""
    for read in (json.loads, float):  # JSON's numbers have a digit before the point
        with suppress(ValueError):
            return read(text)
    return text
