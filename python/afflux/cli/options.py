"""typer, or what takes its place where it is not installed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer
else:
    try:
        import typer
    except ModuleNotFoundError:
        from afflux.cli import plain as typer

#: False: only the commands of the core are there.
INSTALLED = typer.__name__ == "typer"

__all__ = ["INSTALLED", "typer"]
