"""A second build of afflux in this process: an extension and the Python package that calls it.

The second build keeps the module names that its own imports ask for (`afflux.ops`), so its modules are in `sys.modules`
only while its code runs. Two facts about pybind11 make this necessary:

- pybind11 caches every loaded module by the name of its import spec, and returns the cached one for that name. So the
  second extension is loaded as `afflux_other_1._engine`. The last part must stay `_engine`: it names the C function
  that Python calls.
- pybind11 keeps classes and exceptions by the name of their C++ type, for all extensions of a process, unless they are
  declared local to their extension. Those of this build are local; those of an older build need not be.
"""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import afflux
from afflux import _engine

OWN_PACKAGE = Path(afflux.__file__).parent
_numbers = count(1)


class NoBuild(Exception):
    """Raised if there is no build to load; the message has the reason."""


@dataclass(frozen=True)
class Build:
    """A loaded build of afflux."""

    engine: Path  #: the extension
    package: Path  #: the folder of the Python package `afflux` that calls it
    modules: dict[str, ModuleType]  #: the modules of this package, by name

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let every `import` of afflux in the block, also one inside a function, import this build."""
        others = _taken_out()
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules.update(_taken_out())
            sys.modules.update(others)

    def module(self, name: str) -> Any:
        """Return the module afflux.`name`; import it if necessary."""
        with self.active():
            return importlib.import_module(f"afflux.{name}")


def find(path: Path) -> tuple[Path, Path]:
    """Find the extension and the package of a build.

    The running package calls an extension that is outside a package.

    Args:
        path: the extension, the package, a checkout, or a folder of installed packages.

    Raises:
        NoBuild: there is no build at `path`.
    """
    if path.is_file():
        return path, path.parent if (path.parent / "__init__.py").exists() else OWN_PACKAGE
    for folder in (path, path / "python" / "afflux", path / "afflux"):
        for suffix in EXTENSION_SUFFIXES:
            if (engine := folder / f"_engine{suffix}").exists():
                return engine, folder if (folder / "__init__.py").exists() else OWN_PACKAGE
    raise NoBuild(f"{path} is no built extension, and no checkout or package with one (_engine{EXTENSION_SUFFIXES[0]})")


def own() -> Build:
    """Return the running build as a Build: its modules can then be removed and restored like those of the other."""
    return Build(Path(_engine.__file__), OWN_PACKAGE, {name: sys.modules[name] for name in _names()})


def load(path: Path) -> Build:
    """Load the build that `find` finds at `path`; raise NoBuild if there is none, or if it does not load."""
    engine, package = find(path)
    build = Build(engine, package, {})
    with build.active():
        spec = spec_from_file_location("afflux", package / "__init__.py", submodule_search_locations=[str(package)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["afflux"] = root = module_from_spec(spec)
        try:
            sys.modules["afflux._engine"] = root._engine = _extension(engine)  # type: ignore[attr-defined]
            spec.loader.exec_module(root)
        except (ImportError, AttributeError, TypeError) as error:
            raise NoBuild(f"{engine} and {package} do not load: {error}") from error
    return build


def _extension(file: Path) -> ModuleType:
    with TemporaryDirectory(prefix="afflux-") as folder:
        if file.samefile(_engine.__file__):  # the system would load it only once
            file = Path(shutil.copy(file, folder))
        spec = spec_from_file_location(f"afflux_other_{next(_numbers)}._engine", file)
        if spec is None or spec.loader is None:
            raise NoBuild(f"{file} is no extension for this Python: its name must end in {EXTENSION_SUFFIXES[0]}")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _taken_out() -> dict[str, ModuleType]:
    """Remove all modules of afflux from `sys.modules`, and return them."""
    return {name: sys.modules.pop(name) for name in _names()}


def _names() -> list[str]:
    return [name for name in sys.modules if name == "afflux" or name.startswith("afflux.")]
