"""One build of afflux in a process of its own, for `--against`: python -m bench.worker ENGINE PACKAGE.

A request is a line of JSON on standard input: a function of `Worker` and its arguments. The reply is a line on standard
output. What else is printed goes to standard error.
"""

import gc
import hashlib
import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.measure.timing import Timed
    from bench.spec.row import Row


def load(engine: Path, package: Path) -> None:
    """Import the package, which calls this extension.

    Raises:
        ImportError: the extension or the package does not load, or another package comes first on the path.
    """
    spec = spec_from_file_location("afflux._engine", engine)
    if spec is None or spec.loader is None:
        raise ImportError(f"{engine} is no extension for this Python")
    module = sys.modules["afflux._engine"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    import afflux

    if not (folder := Path(afflux.__file__).parent).samefile(package):
        raise ImportError(f"the package {folder} comes before it")


class Worker:
    """The functions that `BuildProcess` calls."""

    def __init__(self, engine: Path, package: Path) -> None:
        self._files = engine, package
        self._rows: dict[str, Row] = {}
        self._shared: tuple[Any, Any] | None = None
        self._timed: list[Timed] = []

    def start(self, isa: str | None) -> dict[str, Any]:
        """Load the build; return its description, without paths, and its contenders of each row."""
        load(*self._files)
        from afflux import __version__, ops
        from bench.measure import machine
        from bench.rows import ROWS

        if isa:
            ops.choose_isa(isa)
        self._rows = {row.name: row for row in ROWS}
        return {
            "afflux": __version__,
            "commit": machine.commit(self._files[0].parent),
            "compiler": machine.compiler(self._files[0]),
            "instruction_set": machine.instruction_set(),
            "contenders": {row.name: [by.name for by in row.contenders if by.role == "ours"] for row in ROWS},
        }

    def prepare(self, case: dict[str, Any], row: str, names: list[str]) -> list[dict[str, Any]]:
        """Make these contenders of a row; return the figures of each that a sample does not give."""
        from bench.measure.timing import entrant
        from bench.spec import inputs
        from bench.spec.optional_torch import set_threads

        size = inputs.Case(**case)
        set_threads(size.threads)
        gc.enable()
        self._timed = []
        if self._shared is None or self._shared[0] != size:
            self._shared = None
            self._shared = size, inputs.make(size, 0)
        by_name = {by.name: by for by in self._rows[row].contenders}
        self._timed = [entrant(size, self._rows[row], by_name[name], self._shared[1]) for name in names]
        gc.collect()
        gc.disable()
        figures = ("name", "what", "bytes", "rest", "errors")
        return [{key: getattr(timed, key) for key in figures} for timed in self._timed]

    def sample(self, index: int, number: int) -> float:
        """Make a sample of a contender; return its seconds."""
        return self._timed[index].seconds_of(number)

    def digests(self, index: int, number: int) -> dict[str, str]:
        """Return the SHA-256 of each output of a sample."""
        import numpy as np

        timed = self._timed[index]
        timed.prepare(number)
        outputs = timed.after(timed.sample(number))
        return {name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for name, array in outputs.items()}


def main() -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker(*map(Path, sys.argv[1:]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(worker, request["call"])(**request["arguments"])}
        except Exception as error:  # the other process reports it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
