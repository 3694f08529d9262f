"""The scripts of continuous integration as modules."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())


def script(name: str) -> ModuleType:
    """The script of this name in .ci."""
    loader = SourceFileLoader(name, str(ROOT / ".ci" / name))
    module = module_from_spec(spec_from_loader(name, loader))
    loader.exec_module(module)
    return module
