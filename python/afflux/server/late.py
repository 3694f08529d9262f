"""Steps for arrivals that have waited longer than flush_after."""

from afflux.server.aggregator import Aggregator


def flush_late(aggregator: Aggregator) -> None:
    """Makes the step if it is due and can be made now. `Aggregator.flush(late=True)` waits, and raises if it fails."""
    state = aggregator.admission.state
    tried = state.number, state.since
    if not aggregator.admission.late or aggregator.failed_late == tried:
        return
    try:
        aggregator.enter("flush")
    except Exception:  # for example, the rule's weigh part calls pull
        return
    try:
        aggregator.flush(late=True, wait=False)
    except Exception:  # nothing that it depends on will have changed when the next call comes
        aggregator.failed_late = tried
