"""Entry point of `python -m bench`."""

import typer

from bench.command import bench

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(bench)


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m bench")


if __name__ == "__main__":
    main()
