"""The function of a rule, by its name: a preset, or a function in a file of the user, which is executed."""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from traceback import extract_tb
from types import ModuleType
from typing import Any

from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief, known, known_names
from afflux.rules import RULES
from afflux.rules.rule import Rule

#: The attribute of a loaded file's module that holds the SHA-256 of the text.
DIGEST = "__afflux_sha256__"
#: `loaded_digests` of the parent process: files that have changed since it executed them are refused.
parents_digests: dict[str, str] = {}
_executing = RLock()


def split_rule_name(label: str) -> tuple[str, list[str]]:
    """Split `name[:option=value...]` into the name and the list of options.

    >>> split_rule_name("fedbuff:server_lr=0.5"), split_rule_name("my/rules.py:clipped:clip=1")
    (('fedbuff', ['server_lr=0.5']), ('my/rules.py:clipped', ['clip=1']))
    """
    name, *rest = label.split(":")
    if name.endswith(".py") and rest:
        name = f"{name}:{rest.pop(0)}"
    return name, rest


def rule_function(name: str) -> Callable[..., Rule]:
    """Return the function that makes the rule; raise ConfigError for an unknown preset, file or function."""
    if not name.partition(":")[0].endswith(".py"):
        known("rule", name, RULES)
        return RULES[name]
    return file_function(name, "rule")


def file_function(name: str, kind: str) -> Callable[..., Any]:
    """Return the function that `path/to/file.py:function` names; the file is executed, once in this process.

    The file may import modules that are beside it.

    Args:
        name: the file and its function.
        kind: the kind of object that the function makes, for messages.

    Returns:
        The function.

    Raises:
        ConfigError: no such file or function, or the file fails.
    """
    path, colon, function = name.partition(":")
    if not colon:
        raise ConfigError(f"{path} is a file: write {path}:FUNCTION")
    module = _module(_resolved(path), kind)
    maker = getattr(module, function, None)
    if not inspect.isfunction(maker):
        functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
        defined = sorted(name for name, value in functions.items() if value.__module__ == module.__name__)
        names = known_names(function, defined) if defined else "it has none"
        raise ConfigError(f"{path} has no function {function!r}; {names}")
    return maker


@contextmanager
def imports_beside(name: str) -> Iterator[None]:
    """Let Python find modules in the folder of the file that `name` names, if it names one.

    sys.path is restored after the block. The folder is the last entry of sys.path: a module there does
    not replace an installed one.
    """
    path, _, _ = name.partition(":")
    folder = str(_resolved(path).parent) if path.endswith(".py") else ""
    if not folder or folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file has removed it itself
            sys.path.remove(folder)


def code_digests(rule: str, task: str, selection: str = "") -> dict[str, str]:
    """Return the SHA-256 of the files of a user, to notice changes: of the rule as `rule`, of the task as `task`, ...

    Modules beside a file that it imports count as part of it. The digest of a file that this process has
    executed is that of the executed text. {}: none names a file. Nothing is executed.
    """
    names = {"rule": rule, "task": task, "selection": selection}
    digests = {kind: _digest(name, kind) for kind, name in names.items()}
    return {kind: digest for kind, digest in digests.items() if digest is not None}


def loaded_digests() -> dict[str, str]:
    """Return the digests of the files that this process has executed, for `parents_digests` in its child processes."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.startswith("afflux ")]
    return {name: vars(module)[DIGEST] for name, module in modules if DIGEST in vars(module)}


def _digest(name: str, kind: str) -> str | None:
    file = name.partition(":")[0]
    if Path(file).suffix != ".py":
        return None
    path = _resolved(file)
    loaded = sys.modules.get(_module_name(path, kind))
    return _text_digest(path) if loaded is None else str(vars(loaded)[DIGEST])


def _resolved(path: str) -> Path:
    """Return the path without links; raise ConfigError for NUL and the like, and for links in a circle."""
    try:
        return Path(path).resolve()
    except (ValueError, RuntimeError):
        raise ConfigError(f"{brief(path)} cannot be the name of a file") from None


def _text_digest(path: Path) -> str:
    digest = sha256()
    try:
        beside = {file for _, _, files in _imports_beside(path) for file in files}
        for file in (path, *sorted(beside)):
            digest.update(sha256(file.read_bytes()).digest())
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()


def _imports_beside(path: Path) -> Iterator[tuple[Path, str, list[Path]]]:
    """Yield each import of a module beside `path`, also those of these modules: the file, the name, the module's files.

    The imports are read from the text: a value such as `from helper import SCALE` does not name its module.
    """
    waiting, read = [path], set[Path]()
    while waiting:
        file = waiting.pop()
        read.add(file)
        for name in sorted(_imported(file)):
            place = path.parent / name.replace(".", "/")
            files = (place.with_name(f"{place.name}.py"), place / "__init__.py")
            beside = [file for file in files if file.is_file()]
            if beside:
                yield file, name, beside
                waiting += [file for file in beside if file not in read]


def _refuse_other_modules(path: Path) -> None:
    """Raise ConfigError if a file has imported an installed or earlier module instead of the module beside the file."""
    for file, name, beside in _imports_beside(path):
        origin = getattr(sys.modules.get(name), "__file__", None)
        places = [place.resolve() for place in beside]  # which may be links, as the origin
        if origin is not None and Path(origin).resolve() not in places:
            raise ConfigError(f"{file} imports {name}, but gets {origin}, not the one next to it: rename that one")


def _imported(file: Path) -> set[str]:
    """Return the names of modules that a file may import, also in functions; packages that hold them included."""
    names = set[str]()
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # an import of the file reports the error, with its lines
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {".".join(name.split(".")[: count + 1]) for name in names for count in range(name.count(".") + 1)}


def _places(error: Exception, folder: Path) -> str:
    """Return the lines that led to an error, as ' (file.py:3, helper.py:1)': those of the user's files in `folder`."""
    package = Path(__file__).parents[1]
    frames = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
    places = [
        f"{file.relative_to(folder)}:{line}"
        for file, line in frames
        if file.is_relative_to(folder) and "site-packages" not in file.parts and not file.is_relative_to(package)
    ]
    return f" ({', '.join(places)})" if places else ""


def _module_name(path: Path, kind: str) -> str:
    return f"afflux {kind} file {path}"


def _module(path: Path, kind: str) -> ModuleType:
    """Execute the file, once in this process; a thread waits while another one executes it."""
    key = _module_name(path, kind)
    with _executing:
        return sys.modules[key] if key in sys.modules else _executed(path, kind, key)


def _executed(path: Path, kind: str, key: str) -> ModuleType:
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise ConfigError(f"there is no {kind} file {path}")
    spec = spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - the name of the file ends with .py
    module = module_from_spec(spec)
    try:
        sys.modules[key] = module  # dataclasses look up their module there
        digest = _text_digest(path)  # before the file is executed: a change meanwhile is then noticed
        if parents_digests.get(key, digest) != digest:
            raise ConfigError(f"{path}, or a module next to it, has changed since this program began: start it again")
        vars(module)[DIGEST] = digest
        with imports_beside(str(path)):
            spec.loader.exec_module(module)
        _refuse_other_modules(path)
    except BaseException as error:  # an interrupt leaves a file that is executed in part
        sys.modules.pop(key, None)
        if isinstance(error, ConfigError) or not isinstance(error, Exception):
            raise
        places = _places(error, path.parent)
        raise ConfigError(f"{path} failed{places}: {type(error).__name__}: {error}") from error
    return module
