"""The metrics of a task: the numbers that its evaluation returns, and how tables and figures show them."""

import re
from collections.abc import Iterable
from math import inf, isfinite

from msgspec import Struct, structs

from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief

#: Names that columns of tables, attributes of an evaluation and panels of figures have already.
_TAKEN = (
    *("rule", "seed", "arrivals", "version", "virtual_time", "client", "model", "score", "names", "count", "index"),
    *("staleness", "participation"),
)


class Metric(Struct, frozen=True, forbid_unknown_fields=True):
    """A number of an evaluation.

    Attributes:
        name: a word: the column in tables, and the attribute of an `Evaluation`.
        unit: shown behind the name; "%": the values are shares, shown in per cent.
        lower_is_better: whether small values are good, as of a loss.
        range: the least and the largest value, where the axes of figures end; None: the axis follows the data.

    Raises:
        ConfigError: a name or unit that cannot be shown, or no range.
    """

    name: str
    unit: str = ""
    lower_is_better: bool = False
    range: tuple[float | None, float | None] = (None, None)

    def __post_init__(self) -> None:
        name, unit = self.name, self.unit
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w{0,39}", name, re.ASCII)) or name in _TAKEN:
            raise ConfigError(f"the name of a metric is {brief(name)}, must be a word other than {', '.join(_TAKEN)}")
        if not (isinstance(unit, str) and unit.isprintable() and len(unit) <= 20):
            raise ConfigError(f"the unit of metric {name} is {brief(unit)}, must be a short text")
        try:
            low, high = self.bounds
            if not low < high:
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError(f"the range of metric {name} is {brief(self.range)}, must be (low, high)") from None

    @property
    def bounds(self) -> tuple[float, float]:
        """The range with infinite ends in place of None."""
        low, high = self.range
        return -inf if low is None else low, inf if high is None else high

    @property
    def is_share(self) -> bool:
        """Whether the values are shown in per cent."""
        return self.unit == "%"

    @property
    def words(self) -> str:
        """The name as text."""
        return self.name.replace("_", " ")

    def title(self, text: str = "{}") -> str:
        """Return a title, in which the name replaces {}, with the unit behind it."""
        return text.format(self.words) + (f", {self.unit}" if self.unit else "")

    def text(self, value: float, digits: str = "g", sign: str = "") -> str:
        """Return a value with its unit; `digits` is the format of a value in per cent, other values have four."""
        if self.is_share:
            return f"{100 * value:{sign}{digits}}%"
        return f"{value:{sign}.4g}" + (f" {self.unit}" if self.unit else "")

    def difference(self, value: float, sign: str = "") -> str:
        """Return a difference of values: of shares in points, with two digits; others have four, without the unit."""
        return f"{100 * value:{sign}.2f}" if self.is_share else f"{value:{sign}.4g}"

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as the target, or better."""
        return value <= target if self.lower_is_better else value >= target

    def is_in_unit(self, value: float) -> bool:
        """Return whether a value is in the range, or at most a hundredth of the range beyond; for a share that is
        [0, 1]. Other values have another unit: per cent, for example.
        """
        low, high = (0.0, 1.0) if self.is_share else self.bounds
        margin = (high - low) / 100
        return low - margin <= value <= high + margin

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values."""
        return min(values) if self.lower_is_better else max(values)

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of some values."""
        return max(values) if self.lower_is_better else min(values)

    def shown(self, values: Iterable[float]) -> "Metric":
        """Return the metric with which tables show these values: values beyond [0, 1] are not shown in per cent."""
        if self.is_share and any(isfinite(value) and not 0 <= value <= 1 for value in values):
            return structs.replace(self, unit="", range=(None, None))
        return self


#: What `evaluate` returns if a task declares no metrics.
CLASSIFICATION = (Metric("accuracy", "%", range=(0.0, 1.0)), Metric("loss", lower_is_better=True, range=(0.0, None)))
