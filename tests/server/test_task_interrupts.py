"""A task ends once: an interrupt at any call of a push, a cancel or a checkout, then a commit and a reopening."""

import sys

import numpy as np
import pytest

from afflux import Closed, Opened, Server
from afflux.rules import fedbuff


def interrupted(action, k, path):
    """Raises a KeyboardInterrupt at the k-th call within `action`, as a signal would; whether there was one."""
    server = Server(fedbuff(buffer_size=5), np.zeros(4, np.float32), store=path, commit_every=None, log=True)
    task, calls, hit = server.checkout("ann"), 0, False

    def profile(frame, event, _):
        nonlocal calls
        if event == "call" and "afflux" in frame.f_code.co_filename:
            calls += 1
            if calls == k:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        if action == "push":
            server.push(task=task, update=np.ones(4, np.float32))
        elif action == "cancel":
            task.cancel()
        else:
            server.checkout("bob")
    except KeyboardInterrupt:
        hit = True
    finally:
        sys.setprofile(before)
    return server, task.id, hit


@pytest.mark.parametrize("action", ["push", "cancel", "checkout"])
def test_at_every_call(action, tmp_path):
    for k in range(1, 400):
        path = tmp_path / f"{k}"
        server, task_id, hit = interrupted(action, k, path)
        logged, ended = ({entry.task for entry in server.log if isinstance(entry, kind)} for kind in (Opened, Closed))
        assert {task.id for task in server.tasks} <= logged - ended
        waiting, counts = server.arrivals_waiting, server.counts
        closed = task_id in ended
        server.close()
        with Server.open(path) as server:
            status = server.push(task=task_id, update=np.ones(4, np.float32)).status
            assert status == ("expired" if closed else "joined")
            assert server.arrivals_waiting == waiting + (not closed)
            assert server.counts["joined"] == counts["joined"] + (not closed)
        if not hit:
            assert k > 5
            return
    pytest.fail("the action never ended")
