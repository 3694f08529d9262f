"""The builds of afflux that `--against` compares: an extension, the package that calls it, and the benchmark's rows."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import afflux
from afflux import _engine

OWN_PACKAGE = Path(afflux.__file__).parent
#: The folder of this `bench`.
OWN_ROOT = Path(__file__).parents[1]


class NoBuild(Exception):
    """Raised if there is no build to run, or if its process fails; the message has the reason."""


@dataclass(frozen=True)
class Build:
    """The files of a build."""

    engine: Path  #: the extension
    package: Path  #: the folder of the Python package `afflux` that calls it

    @property
    def root(self) -> Path:
        """The folder with the benchmark that times the build: the checkout's, or this one if it has none."""
        checkout = self.package.parents[1]
        return checkout if (checkout / "bench" / "worker.py").exists() else OWN_ROOT


OWN = Build(Path(_engine.__file__), OWN_PACKAGE)


def find(path: Path) -> Build:
    """Find a build. The running package calls an extension that is outside a package.

    Args:
        path: the extension, the package, a checkout, or a folder of installed packages.

    Raises:
        NoBuild: there is no build at `path`.
    """
    path = path.absolute()
    if path.is_file():
        return Build(path, path.parent if (path.parent / "__init__.py").exists() else OWN_PACKAGE)
    for folder in (path, path / "python" / "afflux", path / "afflux"):
        for suffix in EXTENSION_SUFFIXES:
            if (engine := folder / f"_engine{suffix}").exists():
                return Build(engine, folder if (folder / "__init__.py").exists() else OWN_PACKAGE)
    raise NoBuild(f"{path} is no built extension, and no checkout or package with one (_engine{EXTENSION_SUFFIXES[0]})")


class BuildProcess:
    """A process of a build (worker.py). It works only between a request and its reply.

    Args:
        build: the build.
        isa: the instruction set; None for the best one.

    Raises:
        NoBuild: the build does not load.
    """

    def __init__(self, build: Build, isa: str | None) -> None:
        self._build = build
        paths = [str(build.package.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", str(build.engine), str(build.package)],
            cwd=build.root,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        try:
            self.description = self.request("start", isa=isa)
        except NoBuild:
            self.close()
            raise

    def request(self, call: str, **arguments: Any) -> Any:
        """Call a function of the worker; return its result.

        Raises:
            NoBuild: the function raised an error, or the process ended.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps({"call": call, "arguments": arguments}), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply = json.loads(line) if line else {"error": f"its process ended with status {process.wait()}"}
        if "error" in reply:
            raise NoBuild(f"{self._build.engine} with {self._build.package}: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
