"""Gradient scheduling: the clients that have entered in the current pass, and the arrivals that wait for the next."""

from typing import NamedTuple

from afflux.aggregation.arrivals import PendingArrival
from afflux.rules.rule import ClientId


class Participation(NamedTuple):
    """The current pass.

    An object is never changed, but replaced, like the state that it belongs to. It shares its lists with its successor.
    The lists only grow: after an interrupt they may have more entries than the counts.
    """

    num_clients: int
    order: list[ClientId]  #: the clients that have entered; those in the buffer are last
    places: dict[ClientId, int]  #: a client's index in `order`; only valid if `order` has the client there
    queue: list[PendingArrival]  #: the arrivals that wait for the next pass
    entered: int = 0  #: valid entries of `order`
    queued: int = 0  #: valid entries of `queue`

    @classmethod
    def of(cls, num_clients: int, order: list[ClientId], queue: list[PendingArrival]) -> "Participation":
        """Return a pass in which these clients have entered, and these arrivals wait."""
        return cls(num_clients, order, {who: i for i, who in enumerate(order)}, queue, len(order), len(queue))

    @property
    def left(self) -> int:
        """The number of clients that have not entered yet."""
        return self.num_clients - self.entered

    def has(self, client_id: ClientId) -> bool:
        """Return whether the client has entered."""
        place = self.places.get(client_id)
        return place is not None and place < self.entered and self.order[place] == client_id

    def enter(self, client_id: ClientId) -> "Participation":
        """Return the pass after this client has entered. The client must not have entered before."""
        self.places[client_id] = self.entered
        self.order[self.entered :] = [client_id]
        return self._replace(entered=self.entered + 1)

    def defer(self, arrival: PendingArrival) -> "Participation":
        """Return the pass with one more arrival that waits for the next pass."""
        self.queue[self.queued :] = [arrival]
        return self._replace(queued=self.queued + 1)

    def emptied(self, arrivals: int) -> "Participation":
        """Return the pass without the last `arrivals` clients that have entered, and without waiting arrivals."""
        return self._replace(entered=self.entered - arrivals, queue=[], queued=0)

    def discard_leftovers(self) -> None:
        """Remove entries beyond the counts, which an interrupt may have left."""
        del self.queue[self.queued :]

    def waiting(self) -> list[PendingArrival]:
        """Return the arrivals that wait for the next pass."""
        return self.queue[: self.queued]

    def opened(self, buffer_size: int, oldest: int) -> tuple[list[PendingArrival], int, "Participation"]:
        """Return the arrivals that may enter the next buffer now, the number of dropped arrivals, and the new pass.

        If this pass is complete, the next one begins. Arrivals that pulled a version before `oldest` are dropped.
        """
        now = self if self.left else Participation.of(self.num_clients, [], self.waiting())
        if not now.queued:
            return [], 0, now
        entering: list[PendingArrival] = []
        later: list[PendingArrival] = []
        dropped = 0
        for arrival in now.waiting():
            if len(entering) == buffer_size or now.has(arrival.client_id) or not now.left:
                later.append(arrival)
            elif arrival.version < oldest:
                dropped += 1
            else:
                entering.append(arrival)
                now = now.enter(arrival.client_id)
        return entering, dropped, now._replace(queue=later, queued=len(later))
