"""The optimizers of the package, from their registry: the tables of tests are made of it."""

from afflux.rules import optimizers
from afflux.rules.registry import registered_parts

STEPS = {n: part.cls for n, part in registered_parts("step").items() if part.cls.__module__ == optimizers.__name__}


def numbers(step):
    """The numbers of an optimizer after lr, in the order of `ops.Step`."""
    return [getattr(step, name) for name in ("beta", "beta1", "beta2", "epsilon") if hasattr(step, name)]


def adaptive(rule):
    """Whether the rule's optimizer divides by a second moment."""
    return hasattr(rule.step, "epsilon")
