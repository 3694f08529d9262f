"""Detection of shared cores.

Another program, also of another virtual machine, may run on a core's other hardware thread. Additions in registers then
take up to twice as long, and so does other work whose limit is arithmetic. The speed of memory hardly changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from bench.measure import native_probes

#: Rounds of twelve additions in one sample: about 50 us.
ROUNDS = 40_000
#: The results mention shared cores from this ratio of the median to the best time on.
SHARED = 1.15


def _additions() -> Callable[[int], float] | None:
    try:
        found: Callable[[int], float] = native_probes.library().afflux_additions
    except native_probes.MissingCompiler:
        return None  # a note in the results reports this
    return found


@dataclass
class AdditionTimer:
    """A timer of additions, which run between the samples of a run if there are native probes."""

    seconds: list[float] = field(default_factory=list)
    additions: Callable[[int], float] | None = field(default_factory=_additions)

    def sample(self) -> None:
        if self.additions is not None:
            self.seconds.append(self.additions(ROUNDS))

    @property
    def slowdown(self) -> float | None:
        """The median time divided by the best; None without a sample."""
        return median(self.seconds) / min(self.seconds) if self.seconds else None
