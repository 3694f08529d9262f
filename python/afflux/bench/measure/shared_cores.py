"""Whether the cores are shared: a core's other hardware thread may run another program, of another virtual machine too.

Additions in registers then take up to twice as long, and so does work that is bound by computing; memory hardly does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from afflux.bench.measure import native_probes

#: Rounds of twelve additions in one sample: some 50 us.
ROUNDS = 40_000
#: From how many times its best time on the median is worth saying.
SHARED = 1.15


def _additions() -> Callable[[int], float] | None:
    try:
        found: Callable[[int], float] = native_probes.library().afflux_additions
    except native_probes.MissingCompiler:
        return None  # a note of the run says so
    return found


@dataclass
class AdditionTimer:
    """Times additions between the samples of a run, where there are native probes."""

    seconds: list[float] = field(default_factory=list)
    additions: Callable[[int], float] | None = field(default_factory=_additions)

    def sample(self) -> None:
        if self.additions is not None:
            self.seconds.append(self.additions(ROUNDS))

    @property
    def slowdown(self) -> float | None:
        """Median over best; None without a sample."""
        return median(self.seconds) / min(self.seconds) if self.seconds else None
