"""The warning about a norm that needs `ServerOptions.clip_norms`."""

import logging
from collections import deque
from math import inf

from afflux.aggregation.clipping import WINDOW, median_norm
from afflux.aggregation.reports import Report
from afflux.ops.validation import brief

#: The multiple of the median beyond which a norm is reported.
SUSPECT = 100.0

_LOGGER = logging.getLogger("afflux")


class NormWatch:
    """Logs one warning for a rule with second moments: about the first norm beyond SUSPECT medians."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._least = inf  #: at most the least norm of the window
        self._warnings = [None]  # the one that is left; `pop` is atomic

    def see(self, report: Report) -> None:
        """Look at the norms of a round."""
        if self._warnings:
            norms = [norm for norm in report.norms.tolist() if norm == norm]  # those that are known
            self._least = min([self._least, *norms])
            if norms and max(norms) > SUSPECT * self._least:  # the median is at least the least norm
                self._compare(report, norms, max(norms))
            self._window.extend(norms)

    def _compare(self, report: Report, norms: list[float], largest: float) -> None:
        """Warn if the largest norm is beyond SUSPECT medians."""
        window = tuple(self._window)
        self._least = min((*window, *norms))
        median = median_norm(window, norms)
        if median is None or largest <= SUSPECT * median:
            return
        try:
            self._warnings.pop()
        except IndexError:  # another thread warns
            return
        _LOGGER.warning(
            "[Server] client %s's vector has the norm %.3g, and the median is %.3g. Second moments remember such a "
            "vector for thousands of rounds, in which params hardly move: Server(clip_norms=10) bounds its weight",
            brief(report.client_ids[report.norms.tolist().index(largest)]),
            largest,
            median,
        )
