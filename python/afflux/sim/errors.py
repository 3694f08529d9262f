"""Errors of the simulator that a user can act on, and the check for optional packages."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from afflux.ops.errors import AffluxError
from afflux.ops.errors import ConfigError as ConfigError
from afflux.ops.validation import raise_if_from_signal

#: Modules that the laboratory and the simulator import, and the packages of the extra `lab` that hold them.
EXTRA = {name: name for name in ("torch", "sklearn", "matplotlib", "rich", "pandas", "jinja2", "safetensors")}
EXTRA |= {"sklearn": "scikit-learn", "jinja2": "Jinja2"}
#: Those of the extra `sim`.
OF_SIMULATOR = {"torch", "sklearn"}


class TrainingError(AffluxError):
    """The trainings of clients fail, so that a run cannot go on."""


class DivergedError(TrainingError):
    """A number is not finite or too large: of a client, of the server's gradient on validation data, or of a rule."""


class ProcessKilledError(AffluxError):
    """A process of the simulation was killed, for example by a batch system or for lack of memory."""


class MissingExtraError(AffluxError):
    """An optional package is not installed."""


@contextmanager
def note_on_errors(note: str) -> Iterator[None]:
    """Add a note, such as 'while the model was made', to exceptions of the block, which calls a user's function."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


@contextmanager
def errors_of_writing(path: Path) -> Iterator[None]:
    """Raise ConfigError for an error of the system in the block, which writes `path`, or files in this folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or path}: {error.strerror or error}") from None


def text_with_notes(error: BaseException) -> str:
    """Return the message of an error and its notes, in one line if they have no line breaks."""
    try:
        message = str(error)
    except Exception as cause:  # of a user's class
        raise_if_from_signal(cause)
        message = "its message cannot be made"
    return ", ".join([message, *getattr(error, "__notes__", ())])


def require(*modules: str) -> None:
    """Raise MissingExtraError, before any work is done, unless all `modules` can be imported."""
    missing = [EXTRA[module] for module in modules if find_spec(module) is None]
    if missing:
        extra = "sim" if OF_SIMULATOR.issuperset(modules) else "lab"
        raise MissingExtraError(f"the simulator needs {', '.join(missing)}: pip install 'afflux[{extra}]'")
