"""Steps for arrivals that have waited longer than flush_after."""

from afflux.aggregation.frames import clear_stored_frames
from afflux.ops.validation import raise_if_from_signal
from afflux.server.aggregator import Aggregator


def flush_late(aggregator: Aggregator) -> None:
    """Make the step if it is due and can be made now, and raise no error if it fails.

    `Aggregator.flush(late=True)` waits for other threads, and raises an error if the step fails.
    """
    state = aggregator.admission.state
    tried = state.number, state.since
    del state  # an error that the rule keeps may hold this frame
    if not aggregator.admission.late or aggregator.failed_late == tried:
        return
    try:
        aggregator.enter("flush")
    except Exception as error:  # for example, the rule's weigh part calls pull
        raise_if_from_signal(error)
        return
    try:
        aggregator.flush(late=True, wait=False)
    except Exception as error:  # the next call does not try again unless the state has changed
        raise_if_from_signal(error)
        aggregator.failed_late = tried
    finally:
        clear_stored_frames()
