"""Ray in this process: actors are objects, and each message is pickled. Calls of an actor run in their order, at once;
those of an `async` method run in a thread.

`connection.import_ray` returns a `FakeRay` where a test has put it there.
"""

import asyncio
import pickle
from concurrent.futures import CancelledError, Future
from threading import RLock, Thread
from threading import enumerate as enumerate_threads
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
        self._lock, self.waiting = RLock(), []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: Reply(self._made(name, pickle.dumps(arguments))))

    def _made(self, name, message):
        self._ray.connected = True  # a message starts a cluster
        if self.ended:
            return ActorEnded()
        self._ray.messages.append((self, name, message))
        try:
            with self._lock:
                result = getattr(self._instance, name)(*pickle.loads(message))
        except Exception as error:
            return TaskFailed(error)
        if asyncio.iscoroutine(result):
            self._ray.coroutines.append(result)
            self.waiting.append(asyncio.run_coroutine_threadsafe(result, self._ray.loop))
            return self.waiting[-1]
        return pickle.dumps(result)


class FakeRay:
    exceptions = SimpleNamespace(RayActorError=ActorEnded, RayTaskError=TaskFailed)
    ObjectRef = Reply

    def __init__(self):
        self.messages = []  # (actor, method, arguments)
        self.connected = True
        self.unplaced, self.waits = 0, []  # the number of actors that no node can place; the timeouts of `wait`
        self._loop, self._starting, self.coroutines = None, RLock(), []

    @property
    def loop(self):
        """Runs the `async` methods of actors."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, daemon=True)
                self._thread.start()
            return self._loop

    def shutdown(self):
        """End what answers the requests of handles."""
        while answering := [thread for thread in enumerate_threads() if thread.name == "afflux-handle"]:
            answering[0].join()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
            self._thread.join()
            for coroutine in self.coroutines:  # one that the loop has begun late, or never
                coroutine.close()
            self._loop.close()

    async def _cancel(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    def put(self, value):
        return Reply(pickle.dumps(value))

    def remote(self, kind):
        made = SimpleNamespace(remote=lambda *arguments: Actor(self, kind(*arguments)))
        return SimpleNamespace(options=lambda **options: made)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "one")

    def is_initialized(self):
        return self.connected

    def get(self, reply):
        result = reply.result
        if isinstance(result, Future):
            try:
                return pickle.loads(pickle.dumps(result.result()))
            except CancelledError:
                raise ActorEnded from None
        if isinstance(result, Exception):
            raise result
        return pickle.loads(result)

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
        for future in actor.waiting:
            future.cancel()
        if hasattr(actor._instance, "unlock"):
            actor._instance.unlock()  # as the end of its process does
