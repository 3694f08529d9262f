"""Digests of what a run reads: a run that continues with other data would mix results without an error."""

import logging
from collections.abc import Mapping, Sequence
from hashlib import file_digest
from importlib.metadata import version
from re import sub
from typing import TYPE_CHECKING, Any

from afflux import __version__
from afflux.sim.data.content_digest import content_digest
from afflux.sim.errors import ConfigError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.delay_names import DELAYS_OF_TASK, delay_law
from afflux.sim.workload.device_traces import trace_path
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Divided, Task

if TYPE_CHECKING:
    from torch import nn


_LOGGER = logging.getLogger("afflux")


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which the bits of a run depend."""
    return {"afflux": __version__} | {name: version(name) for name in ("numpy", "torch")}


def refuse_other_inputs(
    place: str, inputs: Mapping[str, Any], now: Mapping[str, Any], versions: Mapping[str, str], recorded: bool
) -> None:
    """Compare the inputs of a run with those with which it goes on.

    Args:
        place: the file or folder of the run, for messages.
        inputs: those with which the run began.
        now: the present ones.
        versions: of packages, when the run began; others are one line of notice.
        recorded: whether `inputs` has digests; their absence is one line of notice.

    Raises:
        ConfigError: an input is another one; the error names it.
    """
    names = sorted({*inputs, *now} if recorded else inputs)
    changed = [f"{name} {versions[name]}" for name, new in package_versions().items() if versions.get(name, new) != new]
    if other := [name for name in names if inputs.get(name) != now.get(name)]:
        raise ConfigError(
            f"{place}: the run began with other inputs: {', '.join(other)}; undo the change, or begin a new run"
            + (f" (that was with {', '.join(changed)})" if changed else "")
        )
    if not recorded:
        _LOGGER.warning("%s holds no digests of its inputs: a change of the data is not noticed", place)
    if changed:
        _LOGGER.warning("%s: the run began with %s: its bits may differ from here on", place, ", ".join(changed))


def input_digests(config: SimConfig, task: Task, data: Sequence[Any], module: "nn.Module") -> dict[str, str]:
    """Return the SHA-256 of each input of a run, by its name; an input whose bytes cannot be read has no entry.

    Args:
        config: the settings; the file of their delays is an input.
        task: the task.
        data: the data sets of the clients, for the seed of the run.
        module: the initial model, with the parameters that are not trained.
    """
    divided = data if isinstance(data, Divided) else None
    # An address in the text of a module is another one in each process.
    model = [sub(r" at 0x[0-9a-fA-F]+", "", str(module)), dict(module.state_dict())]
    inputs: dict[str, Any] = {"model": model, "clients": None if divided is None else divided.indices}
    if task.source is not None:
        inputs["data"] = task.source
    else:
        inputs["data"] = data if divided is None else [divided.x, divided.y]
        inputs["evaluation"] = task.evaluate if isinstance(task.evaluate, Classification) else None
        inputs["validation"] = task.validation
    digests = {name: digest for name, content in inputs.items() if (digest := content_digest(content)) is not None}
    trace = None if config.delays == DELAYS_OF_TASK else getattr(delay_law(config.delays), "file", None)
    if trace is not None:
        with trace_path(trace).open("rb") as file:
            digests["delays"] = file_digest(file, "sha256").hexdigest()
    return digests
