"""The discrete-event loop: who starts training when, and who finishes when.

The schedule does not look at models, so one seed gives every rule the same dispatches and delays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from afflux.sim.delays import Delay


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A client pulls the model and starts training."""

    time: float
    sequence: int
    client: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of dispatch number `sequence` reaches the server."""

    time: float
    sequence: int
    client: int


def schedule(
    clients: Sequence[int],
    *,
    concurrency: int,
    arrivals: int,
    delay: Delay,
    selection: np.random.Generator,
    times: np.random.Generator,
    refill: int = 1,
) -> Iterator[Dispatch | Arrival]:
    """Yield dispatches and arrivals in the order of virtual time, until `arrivals` arrivals.

    `concurrency` clients train at once. A client that finishes is replaced by one drawn uniformly
    from the idle ones (itself included), equal finish times arrive in the order of dispatch.
    Replacements start when `refill` clients have finished: 1 is at once, the buffer size is the
    loop that CA2FL and FADAS were run with, and all of `concurrency` are FedAvg's rounds.
    """
    if not 1 <= concurrency <= len(clients):
        raise ValueError(f"[schedule] concurrency {concurrency} is not in 1..{len(clients)}")
    if not 1 <= refill <= concurrency:
        raise ValueError(f"[schedule] refill {refill} is not in 1..{concurrency}")
    idle = list(clients)
    training: list[tuple[float, int, int]] = []
    sequence = 0
    now = 0.0
    done = 0
    vacant = concurrency
    while done < arrivals:
        for _ in range(vacant):
            # Swapping with the last makes the draw O(1); the order of `idle` stays deterministic.
            chosen = int(selection.integers(len(idle)))
            idle[chosen], idle[-1] = idle[-1], idle[chosen]
            client = idle.pop()
            yield Dispatch(now, sequence, client)
            heappush(training, (now + delay(client, times), sequence, client))
            sequence += 1
        now, number, client = heappop(training)
        yield Arrival(now, number, client)
        idle.append(client)
        done += 1
        vacant = refill if done % refill == 0 else 0
