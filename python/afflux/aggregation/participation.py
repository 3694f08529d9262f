"""Gradient scheduling: who has entered in the current pass over all clients, and which arrivals wait for the next."""

from typing import NamedTuple

from afflux.aggregation.arrivals import PendingArrival
from afflux.rules.rule import ClientId


class Participation(NamedTuple):
    """Never changed but replaced, like the state that it belongs to. Lists are shared with the next one, and only grow:
    an interrupt may leave more in them than the counts say.
    """

    num_clients: int
    order: list[ClientId]  #: who has entered, those that are in the buffer last
    places: dict[ClientId, int]  #: of a client in `order`, if that agrees
    queue: list[PendingArrival]  #: the arrivals that wait for the next pass
    entered: int = 0  #: entries of `order` that count
    queued: int = 0  #: entries of `queue` that count

    @classmethod
    def of(cls, num_clients: int, order: list[ClientId], queue: list[PendingArrival]) -> "Participation":
        """With these clients entered, and these arrivals waiting."""
        return cls(num_clients, order, {who: i for i, who in enumerate(order)}, queue, len(order), len(queue))

    @property
    def left(self) -> int:
        """Clients that have not entered yet."""
        return self.num_clients - self.entered

    def has(self, client_id: ClientId) -> bool:
        """Whether the client has entered."""
        place = self.places.get(client_id)
        return place is not None and place < self.entered and self.order[place] == client_id

    def enter(self, client_id: ClientId) -> "Participation":
        """The client, which has not entered yet, does."""
        self.places[client_id] = self.entered
        self.order[self.entered :] = [client_id]
        return self._replace(entered=self.entered + 1)

    def defer(self, arrival: PendingArrival) -> "Participation":
        """An arrival waits for the next pass."""
        self.queue[self.queued :] = [arrival]
        return self._replace(queued=self.queued + 1)

    def emptied(self, arrivals: int) -> "Participation":
        """The last clients to enter have not, and nothing waits any more."""
        return self._replace(entered=self.entered - arrivals, queue=[], queued=0)

    def discard_leftovers(self) -> None:
        """Removes entries beyond the counts, which an interrupt may have left."""
        del self.queue[self.queued :]

    def waiting(self) -> list[PendingArrival]:
        """The arrivals that wait for the next pass."""
        return self.queue[: self.queued]

    def opened(self, buffer_size: int, oldest: int) -> tuple[list[PendingArrival], int, "Participation"]:
        """The next buffer with those who may enter now, how many of those were too old, and what remains.

        A pass that is complete gives way to the next. Arrivals that pulled a version before `oldest` are dropped.
        """
        now = self if self.left else Participation.of(self.num_clients, [], self.waiting())
        if not now.queued:
            return [], 0, now
        entering: list[PendingArrival] = []
        later: list[PendingArrival] = []
        dropped = 0
        for arrival in now.waiting():
            if len(entering) == buffer_size or now.has(arrival.client_id):
                later.append(arrival)
            elif arrival.version < oldest:
                dropped += 1
            else:
                entering.append(arrival)
                now = now.enter(arrival.client_id)
        return entering, dropped, now._replace(queue=later, queued=len(later))
