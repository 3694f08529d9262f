"""Asynchronous aggregation for NVIDIA FLARE's Collab API: `AsyncServer` as the server object of a `CollabRecipe`, with
any rule. See docs/guides/nvflare.md.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from afflux.integrations._core import Metrics, TrainingRun
from afflux.integrations._frameworks import missing
from afflux.integrations._loop import Loop
from afflux.integrations._settings import RunSettings, require_absolute_store, rule_of
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, check_fields, count_of, instance, integer, one_of
from afflux.rules.presets.framework_names import FRAMEWORK_NAMES
from afflux.rules.rule import Rule
from afflux.server.server import Server

try:
    from nvflare.apis.analytix import AnalyticsDataType
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
    from nvflare.app_common.abstract.model import make_model_learnable
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.app_event_type import AppEventType
    from nvflare.collab import collab
except ImportError as error:
    missing("nvflare 2.9", "nvflare", error)

from afflux.integrations._nvflare_calls import CollabTransport, Model

#: The content of a reply: the client's own parameters, or their difference from those that it was sent.
ParamsType = Literal["FULL", "DIFF"]


class AsyncServer(FLComponent):
    """A server that lets `concurrency` clients train at the same time, and makes a new version of every M replies.

    A subclass defines `initial_model`, and perhaps `evaluate`. Its module is sent to the server with the job, whose
    configuration is JSON: arguments are plain data.

    Clients publish `train(model, version)`, which returns the params by name, or a pair of params and metrics, or an
    `FLModel`. In a reply's metrics, "client_lr" and "local_steps" replace the settings of these names.

    Args:
        rule: the name of a rule in `afflux.rules`, or its configuration (`Rule.to_config`), or the rule.
        rule_options: the options of the rule with this name. NVFlare's names are accepted, too: num_updates_for_model,
            max_model_history, global_lr; and for "fedbuff", which then is NVFlare's own, staleness_weight.
        num_rounds: number of versions, with those of the runs before.
        call: the function that clients publish.
        call_args: more arguments of this function, by name.
        params_type: the content of replies: "FULL", the client's model, or "DIFF", its difference from the model that
            was sent. An `FLModel` of the other type is refused.
        weight_key: key of the number of examples, or local steps, in a reply's metrics, for rules that weigh by it. For
            an `FLModel` without it, NUM_STEPS_CURRENT_ROUND of its meta counts.
        loss_key: key of the training loss in a reply's metrics.
        settings: the settings that all adapters share (docs/reference/adapters.md): concurrency, timeout, store, ...

    Attributes:
        server: the `afflux.Server` of the run: params, counts, log, ...
        lost: counts of replies without an open call ("unknown"), of calls that failed ("failed"), and of clients that
            exceeded the timeout ("overdue").

    Raises:
        AffluxError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        rule: str | Mapping[str, Any] | Rule = "fedbuff",
        rule_options: Mapping[str, Any] | None = None,
        num_rounds: int = 3,
        call: str = "train",
        call_args: Mapping[str, Any] | None = None,
        params_type: ParamsType = "FULL",
        weight_key: str = "num_steps",
        loss_key: str = "train_loss",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        # NVFlare reads these attributes by the names of the arguments, and writes them into the job's configuration.
        config = rule.to_config() if isinstance(rule, Rule) else rule
        self.rule = config if isinstance(config, str) else _plain("rule", config)
        self.rule_options, self.call_args = _plain("rule_options", rule_options), _plain("call_args", call_args)
        self.settings = _plain("settings", settings)
        self.num_rounds, self.call, self.params_type = num_rounds, call, params_type
        self.weight_key, self.loss_key = weight_key, loss_key
        check_fields(self, count_of(1), "num_rounds", op="AsyncServer")
        check_fields(self, instance(str, "a str"), "call", "weight_key", "loss_key", op="AsyncServer")
        check_fields(self, one_of("FULL", "DIFF"), "params_type", op="AsyncServer")
        self.server: Server | None = None
        self.lost: dict[str, int] = {}
        self.configured()  # so that errors are raised where the job is made
        if type(self).initial_model is AsyncServer.initial_model:
            # For this class itself, NVFlare would put the module nvflare.py into the job, instead of its own.
            raise AffluxError(f"[AsyncServer] {type(self).__name__} lacks initial_model(): define it in a subclass")

    def initial_model(self) -> Model:
        """Return the params of version 0 by name, such as a state_dict; all versions have its library and dtypes."""
        raise NotImplementedError

    def evaluate(self, version: int, model: Model) -> Metrics | None:
        """Evaluate a version, every `evaluate_every` versions; the returned numbers are sent to NVFlare's trackers.

        Args:
            version: the number of the version.
            model: a copy of the version's params.
        """
        return None

    def configured(self) -> tuple[Rule, RunSettings]:
        """Return the rule and the settings that the arguments describe."""
        options = dict(self.rule_options)
        history = options.pop("max_model_history", None)  # None: all are kept
        settings, others = RunSettings.split(self.settings)
        if others:
            raise AffluxError(f"[AsyncServer] settings has {brief(min(others))}, which is no setting")
        why = "the server runs in a folder of its own, which the simulator deletes when a job starts"
        require_absolute_store("AsyncServer", settings, why)
        if history is not None:
            most = integer(1)("AsyncServer", "max_model_history", history) - 1
            if "max_staleness" in settings.server_options:
                raise AffluxError("[AsyncServer] max_model_history and max_staleness are both given")
            settings = replace(settings, server_options={**settings.server_options, "max_staleness": most})
        if self.rule == "fedbuff" and not FRAMEWORK_NAMES["nvflare"].keys().isdisjoint(options):
            options.setdefault("dialect", "nvflare")
        return rule_of("nvflare", self.rule, options), settings

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> Model:
        """Train until the server has made `num_rounds` versions; return a copy of the last one.

        Raises:
            AffluxError, StoreError: the rule does not fit the model or the options; the store is another server's.
                Or no client publishes the function `call`, or `evaluate` returns no numbers by name.
            RuntimeError: all clients fail.
            RunAborted: the job was aborted.
        """
        rule, settings = self.configured()
        sites = {proxy.name: proxy for proxy in collab.clients}
        training = TrainingRun(rule, self.initial_model(), settings, num_clients=len(sites))
        self.server, self.lost = training.server, training.lost
        transport = CollabTransport(self, sites, training)
        with training.closed_on_error():
            transport.require_function()
        with Loop(training, transport) as loop:
            loop.run(self.num_rounds)
            return training.versions.copied(loop.result)

    # NVFlare's jobs and events

    def add_to_fed_job(self, job: Any, ctx: Any, **options: Any) -> Any:
        """Add this object to a job; NVFlare calls this method. Warns of filters, because Collab calls none of them."""
        apps = [app.app_config for app in getattr(job, "_deploy_map", {}).values()]
        tables = [table for app in apps for table in (app.task_data_filters, app.task_result_filters)]
        if names := sorted({type(each).__name__ for table in tables for _, own in table for each in own}):
            self.logger.warning(
                "Collab does not pass models and results through task filters. These have no effect: %s. Apply them in "
                "%s() of the client (docs/guides/nvflare.md)",
                *(", ".join(names), self.call),
            )
        return job.add_component(ctx.comp_id, self, ctx)

    def publish_version(self, version: int, model: Model) -> None:
        """Fire GLOBAL_WEIGHTS_UPDATED, for persistors and other handlers."""
        with collab.fl_ctx.get_engine().new_context() as context:
            context.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(model, {}), private=True, sticky=True)
            context.set_prop(AppConstants.CURRENT_ROUND, version, private=True, sticky=True)
            self.fire_event(AppEventType.GLOBAL_WEIGHTS_UPDATED, context)

    def publish_metrics(self, group: str, version: int, metrics: Metrics) -> None:
        """Send numbers to NVFlare's trackers, such as its TensorBoard receiver, under the tags group/name."""
        with collab.fl_ctx.get_engine().new_context() as context:
            for name, value in metrics.items():
                tag, kind = f"{group}/{name}", AnalyticsDataType.SCALAR
                send_analytic_dxo(self, create_analytic_dxo(tag, value, kind, global_step=version), context)


def _plain(name: str, value: Any) -> dict[str, Any]:
    """Return an argument in the form of the job's configuration."""
    try:
        return dict(json.loads(json.dumps({} if value is None else dict(value))))
    except (TypeError, ValueError) as error:
        raise AffluxError(f"[AsyncServer] {name} is {brief(value)}, must be a dict as JSON has it: {error}") from None
