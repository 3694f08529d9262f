"""What tests compile: once in a session, by whichever worker needs it first."""

import fcntl
import os
import shutil
import subprocess
import sys

# A virtual environment's own cmake and ninja, where there are any, before the system's.
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
CMAKE = shutil.which("cmake", path=PATH)


def run(*command, **environment):
    """What the command prints; it must succeed."""
    done = subprocess.run(
        command, env=os.environ | {"PATH": PATH} | environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(source, folder, *options, targets=()):
    """Configures and builds, with no warning."""
    run(CMAKE, "-S", source, "-B", folder, "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", *options)
    run(CMAKE, "--build", folder, "--parallel", "2", *(["--target", *targets] if targets else []))


def once(tmp_path_factory, name, make):
    """The folder that `make(folder)` fills, for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = base / name, base / f"{name}.made"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            made.touch()
    return folder
