"""The optimizers of the package, from their registry: the tables of tests are made of it."""

from dataclasses import fields, replace

import numpy as np

from afflux.rules import optimizers
from afflux.rules.registry import registered_parts
from afflux.rules.rule import Arrivals

STEPS = {n: part.cls for n, part in registered_parts("step").items() if part.cls.__module__ == optimizers.__name__}


def instance(cls, lr, i=0):
    """An optimizer all of whose other numbers differ, from each other and from those of one with another i."""
    names = [field.name for field in fields(cls) if field.type is float]
    return cls(lr, **{name: 0.5 + i / 16 + j / 128 for j, name in enumerate(names)})


def numbers(step):
    """The numbers of an optimizer after lr in its first step, as `oracle.step` takes them."""
    facts = Arrivals(0, (), *[np.zeros(0, np.int64)] * 3, *[np.zeros(0)] * 2)
    first = replace(step, lr=1.0)(facts)
    return first.beta1, first.beta2, first.epsilon, first.root_scale


def adaptive(rule):
    """Whether the rule's optimizer divides by a second moment."""
    return hasattr(rule.step, "epsilon")
