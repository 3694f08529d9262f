"""Ray in this process: actors are objects, and each message is pickled. Calls of an actor run in their order, at once.

`connection.import_ray` returns a `FakeRay` where a test has put it there.
"""

import pickle
from types import SimpleNamespace


class ActorEnded(Exception):
    pass


class TaskFailed(Exception):
    def __init__(self, cause):
        self.cause = cause


class Reply:
    def __init__(self, result):
        self.result = result


class Actor:
    def __init__(self, ray, instance):
        self._ray, self._instance, self.ended = ray, instance, False

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: Reply(self._made(name, pickle.dumps(arguments))))

    def _made(self, name, message):
        self._ray.connected = True  # a message starts a cluster
        if self.ended:
            return ActorEnded()
        self._ray.messages.append((self, name, message))
        try:
            result = getattr(self._instance, name)(*pickle.loads(message))
        except Exception as error:
            return TaskFailed(error)
        return pickle.dumps(result)


class FakeRay:
    exceptions = SimpleNamespace(RayActorError=ActorEnded, RayTaskError=TaskFailed)

    def __init__(self):
        self.messages = []  # (actor, method, arguments)
        self.connected = True
        self.unplaced, self.waits = 0, []  # the number of actors that no node can place; the timeouts of `wait`

    def remote(self, kind):
        made = SimpleNamespace(remote=lambda *arguments: Actor(self, kind(*arguments)))
        return SimpleNamespace(options=lambda **options: made)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "one")

    def is_initialized(self):
        return self.connected

    def get(self, reply):
        if isinstance(reply.result, Exception):
            raise reply.result
        return pickle.loads(reply.result)

    def wait(self, replies, num_returns, timeout):
        self.waits.append(timeout)
        placed = len(replies) - self.unplaced
        return replies[:placed], replies[placed:]

    def cluster_resources(self):
        return {"CPU": 2.0, "node:one": 1.0}

    def available_resources(self):
        return {"node:one": 1.0}

    def kill(self, actor):
        actor.ended = True
        actor._instance.unlock()  # as the end of its process does
