"""What a server decides about pushes, in plain Python, from docs/server.md, docs/threads.md and the docstrings."""

STATUSES = ["joined", "replaced", "superseded", "rejected", "dropped", "deferred", "empty", "expired", "faulty"]


class Admission:
    """The decisions of a server whose rounds take the mean, so that only who is in them matters.

    `rounds` has, for each round, the joins of its arrivals.
    """

    def __init__(
        self, size, duplicates="both", max_staleness=None, num_clients=None, max_deferred=None, by_flush=False
    ):
        self.size, self.duplicates, self.max_staleness, self.by_flush = size, duplicates, max_staleness, by_flush
        self.num_clients = num_clients  # of gradient scheduling; None: clients enter as they come
        self.max_deferred = 10 * num_clients if max_deferred is None and num_clients else max_deferred
        self.version = self.number = 0
        self.counts = dict.fromkeys([*STATUSES, "refused"], 0)
        self.buffer, self.queue, self.entered = [], [], []  # (client, version, join), oldest first; clients of the pass
        self.rounds, self.log, self.tasks = [], [], {}
        self.clock = 0.0

    def left(self):
        return self.num_clients - len(self.entered)

    def full(self):
        size = self.size if self.num_clients is None else min(self.size, self.left() + len(self.buffer))
        return bool(self.buffer) and not self.by_flush and len(self.buffer) >= size

    def overdue(self):
        """Rounds that a pass begins with are made before anything else."""
        while self.num_clients is not None and self.full():
            self.round()

    def checkout(self, client, lease=None):
        self.expire()
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
            self.overdue()
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
        elif status == "deferred":
            self.queue.append(entry)
        if status == "joined" and self.full():
            self.round()
            self.overdue()
        return status, staleness

    def status(self, client, version, staleness):
        if self.max_staleness is not None and staleness > self.max_staleness:
            return "dropped"
        if self.num_clients is not None and (client in self.entered or not self.left()):
            return "rejected" if len(self.queue) >= self.max_deferred else "deferred"
        before = [other for other in self.buffer if other[0] == client]
        if self.duplicates == "both" or not before:
            return "joined"
        if self.duplicates == "reject":
            return "rejected"
        return "superseded" if before[0][1] > version else "replaced"

    def round(self):
        self.version += 1
        self.rounds.append(sorted(join for _, _, join in self.buffer))
        self.buffer = []
        if self.num_clients is None:
            return
        if not self.left():
            self.entered = []
        later = []
        for client, version, join in self.queue:
            if len(self.buffer) == self.size or client in self.entered or not self.left():
                later.append((client, version, join))
            elif self.max_staleness is not None and self.version - version > self.max_staleness:
                self.counts["deferred"] -= 1
                self.counts["dropped"] += 1
            else:
                self.buffer.append((client, version, join))
                self.entered.append(client)
        self.queue = later

    def flush(self):
        self.expire()
        self.overdue()
        if self.buffer:
            self.round()
            self.log.append(("flush",))
            self.overdue()

    def discard(self):
        self.overdue()
        count = len(self.buffer) + len(self.queue)
        if count:
            self.log.append(("discard",))
        if self.num_clients is not None and self.buffer:
            del self.entered[-len(self.buffer) :]
        self.buffer, self.queue = [], []
        return count
