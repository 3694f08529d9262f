"""Entry point of `python -m bench.papers`."""

import signal

from afflux.lab import interrupts
from bench.papers.command import app


def main() -> None:
    """Run the command line. The process must end afterwards: Ctrl-C is ignored while the interpreter ends."""
    with interrupts.deferred(then=signal.SIG_IGN):
        app(prog_name="python -m bench.papers")


if __name__ == "__main__":
    main()
