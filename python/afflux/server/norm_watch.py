"""The warning about a norm that needs `ServerOptions.clip_norms`."""

import logging

from afflux.aggregation.clipping import WINDOW, median_norm
from afflux.aggregation.reports import Report
from afflux.ops.validation import brief

#: The multiple of the median beyond which a norm is reported.
SUSPECT = 100.0

_LOGGER = logging.getLogger("afflux")


class NormWatch:
    """Logs one warning for a rule with second moments: about the first norm beyond SUSPECT medians."""

    def __init__(self) -> None:
        self._window: tuple[float, ...] = ()
        self._warnings = [None]  # the one that is left; `pop` is atomic

    def see(self, report: Report) -> None:
        """Look at the norms of a round."""
        if not self._warnings:
            return
        window, norms = self._window, report.norms.tolist()  # all are known: such a rule's vectors are not lent
        known, largest = window + tuple(norms), max(norms)
        self._window = known[-WINDOW:]
        # Without a sort in nearly all rounds: the median is at least the least norm.
        if largest <= SUSPECT * min(known):
            return
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
            brief(report.client_ids[norms.index(largest)]),
            largest,
            median,
        )
