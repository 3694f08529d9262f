"""Laws of staleness: the factor of an arrival, as a function of its staleness in server steps.

On the exact path: + - * / sqrt, and exp, log and pow of afflux.ops.exact, on single numbers (see rule.py).
"""

from dataclasses import dataclass
from math import sqrt
from typing import Protocol, cast

from afflux.ops import exact
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, check_fields, is_function, not_negative, one_or_more
from afflux.rules.registry import register

#: e/2, the base of WKAFL's and TWAFL's staleness law.
HALF_E = 1.3591409142295225


class StalenessLaw(Protocol):
    """A function s(staleness). In most laws, s is 1 for staleness 0."""

    def __call__(self, staleness: int, /) -> float:
        """Return the factor for one staleness >= 0."""
        ...


def a_law(part: str, name: str, value: object) -> StalenessLaw:
    """Return a law of staleness; raise AffluxError for a value that is not a function."""
    if not is_function(value):
        raise AffluxError(f"[{part}] the {name} is {brief(value)}, must be one such as Polynomial(0.5)")
    return cast(StalenessLaw, value)


@register("constant", "staleness")
@dataclass(frozen=True, slots=True)
class Constant:
    """s = 1."""

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0


@register("polynomial", "staleness")
@dataclass(frozen=True, slots=True)
class Polynomial:
    """s = (1 + staleness)^-a (FedAsync section 5.2; FedBuff uses a = 1/2)."""

    a: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, not_negative, "a")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        base = 1.0 + staleness
        if self.a > 8 or 2 * self.a != int(2 * self.a):
            return exact.pow(base, -self.a)
        # Up to 8 products and a square root: faster than pow, and with the bits of the first versions.
        power = sqrt(base) if int(2 * self.a) % 2 else 1.0
        for _ in range(int(self.a)):
            power = power * base
        return 1.0 / power


@register("hinge", "staleness")
@dataclass(frozen=True, slots=True)
class Hinge:
    """s = 1 up to staleness b, then 1 / (a (staleness - b) + 1) (FedAsync section 5.2)."""

    a: float = 10.0
    b: float = 4.0

    def __post_init__(self) -> None:
        check_fields(self, not_negative, "a", "b")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)


@register("exponential", "staleness")
@dataclass(frozen=True, slots=True)
class Exponential:
    """s = base^-staleness, with base e/2 (TWAFL, Chen et al. 2019; WKAFL section 4.3.2)."""

    base: float = HALF_E

    def __post_init__(self) -> None:
        check_fields(self, one_or_more, "base")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return exact.pow(self.base, -float(staleness))


@register("inverse", "staleness")
@dataclass(frozen=True, slots=True)
class Inverse:
    """s = 1 / max(staleness, 1) (SASGD, Zhang et al. 2016)."""

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0 / max(staleness, 1)
