"""Laws of running times by name, with options: `fadas-large:gamma=0.5`."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, get_type_hints

from afflux.sim.errors import ConfigError, known
from afflux.sim.workload.delay_laws.device_availability import DeviceAvailability
from afflux.sim.workload.delay_laws.device_times import DeviceTimes
from afflux.sim.workload.delay_laws.fadas import FadasDelays
from afflux.sim.workload.delay_laws.half_normal import HalfNormalDelays
from afflux.sim.workload.delay_laws.law import DelayLaw
from afflux.sim.workload.delays import DELAYS
from afflux.sim.workload.rule_specs import option_value, split_assignments


@dataclass(frozen=True)
class Family:
    """Laws with options."""

    description: str
    law: type[Any]
    """A dataclass whose fields are the options, and which is a DelayLaw."""
    preset: dict[str, Any]
    """Options that the name sets; options of the same name in the text replace them."""


_PHONE_TIMES = {"file": "traces/phone_training_latency.csv", "time": "resnet_ms", "deviation": "resnet_std_ms"}
_PHONE_AVAILABILITY = {
    "file": "traces/flash_availability_intervals.csv",
    "start": "ready_start_s",
    "end": "ready_end_s",
}

#: The delays of the task itself.
DELAYS_OF_TASK = "task"

FAMILIES: dict[str, Family] = {
    "fadas-large": Family("FADAS's classes, large worst-case delays", FadasDelays, {"low": 50.0, "high": 80.0}),
    "fadas-mild": Family("FADAS's classes, mild delays", FadasDelays, {"low": 5.0, "high": 8.0}),
    "ca2fl": Family("CA2FL's half-normal laws, s ~ U(0, 5)", HalfNormalDelays, {}),
    "ca2fl-1": Family("CA2FL's half-normal laws, s ~ U(0, 1)", HalfNormalDelays, {"upper": 1.0}),
    "ca2fl-0.5": Family("CA2FL's half-normal laws, s ~ U(0, 0.5)", HalfNormalDelays, {"upper": 0.5}),
    "ca2fl-fixed": Family("CA2FL's fixed law halfnorm(5)", HalfNormalDelays, {"s": 5.0}),
    "device-times": Family("running times of devices, from a CSV file", DeviceTimes, {}),
    "device-availability": Family("times at which devices are ready, from a CSV file", DeviceAvailability, {}),
    "phone-times": Family("training times of phones, in ms (FLHetBench's table)", DeviceTimes, _PHONE_TIMES),
    "phone-availability": Family(
        "when phones are ready, in s (FLASH's trace)", DeviceAvailability, _PHONE_AVAILABILITY
    ),
}


def delay_law(text: str) -> DelayLaw:
    """Return the law of `NAME` or `NAME:OPTION=VALUE:...`.

    Args:
        text: a name of `FAMILIES`, with or without options, or one of `DELAYS` without.

    Raises:
        ConfigError: an unknown name or option, a value out of range, or an option that is missing.
    """
    name, *assignments = text.split(":")
    if name == DELAYS_OF_TASK:
        raise ConfigError(f"delays is {DELAYS_OF_TASK}, which is for a task that has delays of its own")
    known("delays", name, {**DELAYS, **FAMILIES, DELAYS_OF_TASK: None})
    if not assignments and name in DELAYS:
        return DELAYS[name]
    if name not in FAMILIES:
        raise ConfigError(f"delays {text}: {name} has no options")
    family = FAMILIES[name]
    given = split_assignments(f"delays {text}", assignments, f"delays {name}", options(name))
    missing = [field.name for field in fields(family.law) if field.default is MISSING]
    if absent := [option for option in missing if option not in {**family.preset, **given}]:
        raise ConfigError(f"delays {text}: needs {', '.join(f'{option}=...' for option in absent)}")
    hints = get_type_hints(family.law)
    try:
        values = {option: option_value(value, hints[option]) for option, value in given.items()}
        law: DelayLaw = family.law(**{**family.preset, **values})
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"delays {text}: {error}") from None
    return law


def options(name: str) -> tuple[str, ...]:
    """Return the options of a name of `FAMILIES`."""
    return tuple(field.name for field in fields(FAMILIES[name].law))


def describe_delays() -> str:
    """Return a line for each name, for help texts."""
    lines = [f"{name}: {_first_line(law)}" for name, law in DELAYS.items() if name not in FAMILIES]
    return "\n".join(
        lines + [f"{name}: {family.description}; {', '.join(options(name))}" for name, family in FAMILIES.items()]
    )


def _first_line(law: Callable[..., Any]) -> str:
    function = law.func if isinstance(law, partial) else law
    return (function.__doc__ or "").partition("\n")[0].rstrip(".")
