"""A job of NVFlare is killed, and another one goes on from its store."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from afflux import Server
from nvflare_servers import four, run, stored

KILLED = """
import os, signal, sys, pytest
sys.path[:0] = {path!r}
import nvflare_servers as tests
from nvflare_sites import Sites
class Kill(Sites):
    def deliver(self):
        if self.sent > 14:
            os.kill(os.getpid(), signal.SIGKILL)
        super().deliver()
with pytest.MonkeyPatch.context() as patch:
    tests.run(tests.stored({store!r}, 9), tests.four(1.0, -2.0, 0.5, 3.0, kind=Kill), patch)
"""


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    """Calls end with the process that made them: their tasks are cancelled, and the clients train again."""
    script = KILLED.format(path=[str(Path(__file__).parent)], store=str(tmp_path / "store"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=1800, check=False, env=dict(os.environ)
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Server.open(tmp_path / "store") as server:
        assert 0 < server.version < 9
        assert server.tasks
        before = server.counts["joined"]
    own = stored(tmp_path / "store", 9)
    sites = four(1.0, -2.0, 0.5, 3.0)
    run(own, sites, monkeypatch)
    assert own.server.version == 9
    assert own.server.counts["joined"] >= 18 > before
    assert own.lost["unknown"] == own.lost["failed"] == 0
    assert min(version for _, _, version in sites.calls) > 0  # it went on
    with Server.open(tmp_path / "store") as server:
        assert server.tasks == ()
