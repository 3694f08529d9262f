"""The warning about arrivals that bring no round nearer."""

from collections.abc import Mapping

from afflux.aggregation.admission import Admission

#: The multiple of buffer_size from which on arrivals without a round are reported, and the factor to the next report.
PATIENCE = 10
#: The statuses of arrivals after which a buffer holds as many arrivals as before.
WITHOUT_PROGRESS = ("replaced", "superseded", "rejected", "dropped", "deferred")


class ProgressWatch:
    """Gives one warning if `PATIENCE` * M arrivals since the last round have not filled its buffer any further.

    After another round there may be a further warning, about `PATIENCE` times as many arrivals: a run whose clients are
    uneven, but which goes on, does not fill its log. Callers hold the mutex.
    """

    def __init__(self) -> None:
        self._most = PATIENCE
        self._warned: Mapping[str, int] | None = None  # the counts at the last round before the warning

    def see(self, admission: Admission) -> str:
        """Look at the state after a decision; return the warning, or an empty text."""
        state = admission.state
        size, counts = state.rule.buffer_size, state.counts_since_round
        without = {status: counts[status] for status in WITHOUT_PROGRESS if counts[status]}
        total = sum(without.values())
        if total < self._most * size or self._warned is state.round_counts:
            return ""
        self._warned = state.round_counts
        self._most *= PATIENCE
        numbers = ", ".join(f"{count:,} {status}" for status, count in without.items())
        cause = _cause(max(without, key=without.__getitem__), admission)
        return (
            f"[Server] {total:,} arrivals since the last round of {state.rule.name} have not filled its buffer any "
            f"further: {numbers}. It holds {state.filled} of {size}. {cause}"
        )


def _cause(status: str, admission: Admission) -> str:
    """Return the reason why most of the arrivals have this status."""
    passes = admission.state.passes
    if status == "dropped":
        return f"They are older than max_staleness={admission.max_staleness}"
    if passes is not None:
        limit = f"; {admission.max_deferred} arrivals wait (max_deferred)" if status == "rejected" else ""
        return f"A client enters once in a pass. Clients that have not entered yet: {passes.left}{limit}"
    return (
        f"A client has one place in a buffer (duplicates={admission.duplicates!r}): a round needs "
        f"{admission.state.rule.buffer_size} different clients"
    )
