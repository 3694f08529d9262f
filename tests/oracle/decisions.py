"""What a server decides about pushes, from docs/reference/server.md, docs/guides/threads.md and docstrings."""

STATUSES = ["joined", "replaced", "superseded", "rejected", "dropped", "empty", "expired", "faulty"]


class Admission:
    """The decisions of a server whose rounds take the mean, so that only who is in them matters.

    `rounds` has, for each round, the joins of its arrivals.
    """

    def __init__(
        self, size, duplicates="both", max_staleness=None, num_clients=None, by_flush=False, participations=None
    ):
        self.size, self.duplicates, self.max_staleness, self.by_flush = size, duplicates, max_staleness, by_flush
        self.num_clients = num_clients  # of gradient scheduling; None: clients enter as they come
        self.participations, self.participants = participations, []  # the clients of all rounds, if they are limited
        self.version = self.number = 0
        self.counts = dict.fromkeys([*STATUSES, "refused"], 0)
        self.buffer, self.entered = [], []  # (client, version, join), oldest first; clients of the pass
        self.rounds, self.log, self.tasks = [], [], {}
        self.clock = 0.0

    def left(self):
        return self.num_clients - len(self.entered)

    def full(self):
        size = self.size if self.num_clients is None else min(self.size, self.left() + len(self.buffer))
        return bool(self.buffer) and not self.by_flush and len(self.buffer) >= size

    def blocks(self, client):
        spent = self.participations is not None and self.participants.count(client) >= self.participations
        return spent or client in self.entered

    def checkout(self, client, lease=None):
        """The number of the task; None if the client is blocked."""
        self.expire()
        if self.blocks(client):
            return None
        self.log.append(("open", client))
        name = len([entry for entry in self.log if entry[0] == "open"]) - 1
        self.tasks[name] = (client, self.version, None if lease is None else self.clock + lease)
        return name

    def expire(self):
        for name, (_, _, deadline) in [*self.tasks.items()]:
            if deadline is not None and deadline <= self.clock:
                del self.tasks[name]
                self.log.append(("close", name, "expired"))

    def cancel(self, name):
        if self.tasks.pop(name, None) is not None:
            self.log.append(("close", name, "cancelled"))

    def push(self, client=None, version=None, task=None, examples=1):
        """The status and the staleness."""
        self.expire()
        if task is not None:
            if task not in self.tasks:
                self.counts["expired"] += 1
                return "expired", None
            client, version, _ = self.tasks[task]
        elif not 0 <= version <= self.version:
            self.counts["refused"] += 1
            return "refused", None
        if examples == 0:
            status, staleness = "empty", self.version - version
        else:
            staleness = self.version - version
            status = self.status(client, version, staleness)
            entry = (client, version, self.number)
            self.log.append(("join", self.number, status, client, version, staleness))
            self.number += 1
        self.counts[status] += 1
        if task is not None:
            del self.tasks[task]
            self.log.append(("close", task, "pushed"))
        if status == "joined":
            self.buffer.append(entry)
            self.entered += [client] if self.num_clients is not None else []
        elif status == "replaced":
            self.buffer = [entry if other[0] == client else other for other in self.buffer]
        if status == "joined" and self.full():
            self.round()
        return status, staleness

    def status(self, client, version, staleness):
        if self.max_staleness is not None and staleness > self.max_staleness:
            return "dropped"
        if self.blocks(client):
            return "rejected"
        if self.num_clients is not None:
            return "joined"
        before = [other for other in self.buffer if other[0] == client]
        if self.duplicates == "both" or not before:
            return "joined"
        if self.duplicates == "reject":
            return "rejected"
        return "superseded" if before[0][1] > version else "replaced"

    def round(self):
        self.version += 1
        self.rounds.append(sorted(join for _, _, join in self.buffer))
        self.participants += [client for client, _, _ in self.buffer] if self.participations is not None else []
        self.buffer = []
        if self.num_clients is not None and not self.left():
            self.entered = []

    def step(self, clients):
        """A round of pushes from the newest version; their statuses."""
        self.expire()
        held, self.by_flush = self.by_flush, True
        statuses = [self.push(client, self.version)[0] for client in clients]
        self.by_flush = held
        self.flush()
        return statuses

    def flush(self):
        if self.buffer:
            self.round()
            self.log.append(("flush",))

    def end_pass(self):
        if self.num_clients is None:
            return
        if self.entered:
            self.log.append(("end_pass",))
        if self.buffer:
            self.round()
        self.entered = []

    def discard(self):
        count = len(self.buffer)
        if count:
            self.log.append(("discard",))
        if self.num_clients is not None and self.buffer:
            del self.entered[-count:]
        self.buffer = []
        return count
