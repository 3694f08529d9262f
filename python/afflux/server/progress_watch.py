"""The warnings about arrivals that bring no round nearer, and about work that is dropped."""

from logging import getLogger

from afflux.aggregation.admission import Admission
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId

#: The multiple of buffer_size from which on arrivals without a round are reported, and the factor to the next report.
PATIENCE = 10
#: The statuses of arrivals after which a buffer holds as many arrivals as before.
WITHOUT_PROGRESS = ("replaced", "superseded", "rejected", "dropped")
#: The statuses with which the work of a push is dropped, and the reasons of those that have no own one.
DROPPED = {
    "superseded": "the buffer holds an arrival of this client from a newer version (duplicates='latest')",
    "rejected": "the buffer holds an arrival of this client (duplicates='reject')",
    "dropped": "it is older than max_staleness",
    "expired": "",
    "faulty": "",
}


class DropWatch:
    """Logs one warning for each status with which work is dropped: at the first such push."""

    def __init__(self) -> None:
        self._left = dict(DROPPED)  # those without a warning; `pop` is atomic

    def see(self, status: str, client_id: ClientId | None, reason: str = "") -> None:
        """Look at the status of a push. The caller does not hold the mutex."""
        if (cause := self._left.pop(status, None)) is not None:
            getLogger("afflux").warning(
                "[push] a push%s is %s: %s. Server.counts counts such pushes; further ones are not logged",
                "" if client_id is None else f" of client {brief(client_id)}",
                status,
                (reason or cause).removeprefix("[push] "),
            )


class ProgressWatch:
    """Gives one warning if `PATIENCE` * M arrivals since the last round have not filled its buffer any further.

    After another round there may be a further warning, about `PATIENCE` times as many arrivals: a run whose clients are
    uneven, but which continues, does not fill its log. Callers hold the mutex.
    """

    def __init__(self) -> None:
        self._most = PATIENCE
        self._warned: int | None = None  # the number of the last round before the warning

    def see(self, admission: Admission) -> str:
        """Look at the state after a decision; return the warning, or an empty text."""
        size, counts = admission.rule.buffer_size, admission.counts_since_round
        without = {status: counts[status] for status in WITHOUT_PROGRESS if counts[status]}
        total = sum(without.values())
        if total < self._most * size or self._warned == admission.rounds_counted:
            return ""
        self._warned = admission.rounds_counted
        self._most *= PATIENCE
        numbers = ", ".join(f"{count:,} {status}" for status, count in without.items())
        cause = _cause(max(without, key=without.__getitem__), admission)
        return (
            f"[Server] {total:,} arrivals since the last round of {admission.rule.name} have not filled its buffer any "
            f"further: {numbers}. It holds {admission.filled} of {size}. {cause}"
        )


def _cause(status: str, admission: Admission) -> str:
    """Return the reason why most of the arrivals have this status."""
    if status == "dropped":
        return f"They are older than max_staleness={admission.max_staleness}"
    if admission.in_passes:
        return f"A client enters once in a pass. Clients that have not entered yet: {admission.left_in_pass}"
    if status == "rejected" and not admission.in_passes and (spent := len(admission.entered)):
        return (
            f"Clients that were in as many rounds as {admission.rule.name} allows "
            f"({admission.rule.needs.participations}): {spent}. A round needs {admission.rule.buffer_size} others"
        )
    return (
        f"A client has one place in a buffer (duplicates={admission.duplicates!r}): a round needs "
        f"{admission.rule.buffer_size} different clients"
    )
