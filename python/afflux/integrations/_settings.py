"""The settings of a run that all adapters share, one frozen, checked set; and the rule, from a configuration."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Self

from afflux.aggregation.options import Options, options_of
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
from afflux.rules.presets.framework_names import FRAMEWORK_NAMES, ONLY_IN_DIALECT, in_our_names
from afflux.rules.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How clients train for one server, whichever framework they are of.

    Args:
        concurrency: clients that train at the same time; None: all that are there when the run starts.
        timeout: seconds after which another client trains in the place of one that has not replied, and a later reply
            has no effect; None: as the framework says, else an hour.
        store: a folder for the server's state; the run goes on from it if it holds a server. None: in memory.
        checkpoint_every: steps after which the clients that train, arrivals that wait and the history are stored too.
        evaluate_every: steps between evaluations.
        max_failures: failures of a client in a row (errors, refused replies, no reply) after which it counts as of no
            use. The run raises when that holds for all clients; until then each of them is tried again.
        retry_after: seconds that a client rests after a failure, or as long as it took to fail if that is more; twice
            as long after each further failure in a row, up to 1024 times.
        poll_interval: seconds between two looks for replies while there are none.
        seed: of the choice of clients.
        num_threads: of a step; None: all CPUs of this process.
        client_lr: learning rate of the clients, for rules that take gradients; what a reply says counts more.
        local_steps: their number of local steps, likewise.
        server_options: fields of `afflux.ServerOptions`, such as max_staleness. Not faults="raise": a client's fault
            would end the run; not inplace=True: replies are models, which need the version that they started from.

    Raises:
        AffluxError: a setting has a wrong type or value.
    """

    concurrency: int | None = None
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
    server_options: Options = field(default_factory=lambda: Options())

    def __post_init__(self) -> None:
        count = count_of(1)
        check_fields(self, count, "checkpoint_every", "evaluate_every", "max_failures", op="settings")
        check_fields(self, optional(count), "concurrency", "local_steps", op="settings")
        check_fields(self, optional(positive), "timeout", "client_lr", op="settings")
        check_fields(self, not_negative, "poll_interval", "retry_after", op="settings")
        check_fields(self, integer(0), "seed", op="settings")
        check_fields(self, optional(a_thread_count), "num_threads", op="settings")
        check_fields(self, optional(path_of), "store", op="settings")
        check_fields(self, instance(dict, "a dict of fields of ServerOptions"), "server_options", op="settings")
        try:
            options_of("settings", None, self.server_options)
        except AffluxError as error:
            raise AffluxError(f"[settings] server_options: {error}") from None
        refuse_options(self.server_options.get("faults", "record"), self.server_options.get("inplace", False))

    @classmethod
    def split(cls, given: Mapping[str, Any], without: Collection[str] = ()) -> tuple[Self, dict[str, Any]]:
        """The settings among keyword arguments, but for those `without` lists, and the other arguments."""
        names = {each.name for each in fields(cls)}.difference(without)
        return cls(**{name: value for name, value in given.items() if name in names}), {
            name: value for name, value in given.items() if name not in names
        }


def is_due(every: int, before: int, step: int) -> bool:
    """Whether one of the steps after `before`, up to `step`, is a multiple of `every`."""
    return step // every > before // every


def require_absolute_store(operation: str, settings: RunSettings, why: str) -> None:
    """Raises for a store whose path depends on the folder that the framework starts the server in."""
    if settings.store is not None and not Path(settings.store).is_absolute():
        raise AffluxError(f"[{operation}] store is {brief(str(settings.store))}, must be an absolute path: {why}")


def refuse_options(faults: str, inplace: bool) -> None:
    """Raises for options of a server that no adapter can serve."""
    if faults != "record":
        raise AffluxError(f'[settings] a server with faults="{faults}" would end the run for one client\'s fault')
    if inplace:
        raise AffluxError(
            "[settings] a server with inplace=True overwrites the version that a client trains from, and replies are "
            "models, which need it"
        )


def rule_of(framework: str, rule: object, options: Mapping[str, Any], num_clients: int | None = None) -> Rule:
    """The rule of a framework's configuration.

    Args:
        framework: a key of `FRAMEWORK_NAMES`.
        rule: a rule; the name of one; or a whole one, as `Rule.to_config` writes it.
        options: of the rule of this name, by afflux's names or the framework's. Where both use one name, such as the
            alpha of "fedasync" and APPFL's, it is afflux's.
        num_clients: for options that are shares of all clients, and for the framework's dialect.

    Raises:
        AffluxError: it is no rule; an option is unknown, has a wrong type or value, or is given twice.
    """
    if not isinstance(rule, str):
        if not (isinstance(rule, Rule) or (isinstance(rule, Mapping) and "part" in rule)):
            raise AffluxError(
                f"[{framework}] rule is {brief(rule)}, must be a Rule, its name and options, or a Rule.to_config()"
            )
        if options:
            raise AffluxError(f"[{framework}] {brief([*options])}: a rule that is given whole has its options inside")
        return rule if isinstance(rule, Rule) else from_config(rule)
    given, own = dict(options), signature(RULES[rule]).parameters if rule in RULES else {}
    if num_clients is not None and ("buffer_ratio" in given or given.get("dialect") == "appfl"):
        given.setdefault("num_clients", num_clients)
    if "dialect" in own and given.get("dialect") == framework:
        return make(rule, **given)
    names = [name for name in FRAMEWORK_NAMES[framework] if name in own or name in ONLY_IN_DIALECT]
    kept = {name: given.pop(name) for name in names if name in given}
    return make(rule, **in_our_names(framework, given), **kept)
