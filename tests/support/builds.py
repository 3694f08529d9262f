"""What tests compile: once in a session, by whichever worker needs it first."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

# A virtual environment's own cmake and ninja, where there are any, before the system's.
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
CMAKE = shutil.which("cmake", path=PATH)
ROOT = Path(__file__).parents[2]


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
    compile_targets(folder, *targets)


def compile_targets(folder, *targets):
    run(CMAKE, "--build", folder, "--parallel", "2", *(["--target", *targets] if targets else []))


def engine(tmp_path_factory):
    """The tree of objects of `make engine`, brought up to date; without one, a tree of this session.

    It also has the extension for an emulated GPU (tests/gpu/emulated.py).
    """

    def make(folder):
        tree = ROOT / "build" / "native"
        if not (tree / "CMakeCache.txt").exists():
            tree = folder / "tree"
            options = ["-DAFFLUX_PYTHON=ON", "-DAFFLUX_CUDA=off", f"-DPython_EXECUTABLE={sys.executable}"]
            run(CMAKE, "-S", ROOT, "-B", tree, *options)
        compile_targets(tree, "all", "_engine_emulated")
        (folder / "path").write_text(str(tree))

    return Path((once(tmp_path_factory, "engine", make) / "path").read_text())


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
