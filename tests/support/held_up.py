"""Work in other threads, and calls that wait there until a test lets them go on."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event


def start(work):
    """The future of a work, for which a thread is started."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future


class HeldUp:
    """Puts a function in place of an attribute: calls for which `when` holds wait, before they begin, for `go`."""

    def __init__(self, patch, owner, name, when=lambda *_, **__: True):
        self.reached, self.go = Event(), Event()
        call = getattr(owner, name)

        def held_up(*arguments, **options):
            if when(*arguments, **options):
                self.reached.set()
                assert self.go.wait(600)
            return call(*arguments, **options)

        patch.setattr(owner, name, held_up)
