"""Steps for arrivals that have waited longer than flush_after."""

from afflux.server.aggregator import Aggregator


def flush_late(aggregator: Aggregator) -> None:
    """Make the step if it is due and can be made now, and raise no error if it fails.

    `Aggregator.flush(late=True)` waits for other threads, and raises an error if the step fails.
    """
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
    except Exception:  # the next call does not try again unless the state has changed
        aggregator.failed_late = tried
