"""Files of the results of a run: JSON, Markdown and pictures, each in a file of its own or all in one folder."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from bench.output import tables
from bench.output.report import to_json, without_samples
from bench.spec.row import Row


@dataclass(frozen=True)
class Files:
    json: Path | None = None
    markdown: Path | None = None
    picture: Path | None = None
    samples: Path | None = None  #: file of the JSON with every sample
    folder: Path | None = None  #: folder of the first three, under fixed names; made if it does not exist

    def check(self) -> None:
        """Check the files before the run, so that no run is lost."""
        for path in (self.json, self.markdown, self.picture, self.samples, self.folder):
            if path and not path.absolute().parent.is_dir():
                raise typer.BadParameter(f"there is no folder for {path}")
        if self.picture or self.folder:
            try:
                import matplotlib  # noqa: F401
            except ModuleNotFoundError:
                raise typer.BadParameter("a picture needs matplotlib: pip install 'afflux[lab]'") from None

    def write(self, out: dict[str, Any], markdown: str, draw: Callable[[Path], None] | None = None) -> None:
        """Write the results, their tables and, with `draw`, their picture to the given files."""
        if self.folder:
            self.folder.mkdir(exist_ok=True)
            inside = (self.folder / name for name in ("bench.json", "bench.md", "bench.png"))
            Files(*inside).write(out, markdown, draw)
        if self.json:
            self.json.write_text(to_json(without_samples(out)), encoding="utf-8")
        if self.samples:
            text = json.dumps(out).encode()
            self.samples.write_bytes(gzip.compress(text) if self.samples.suffix == ".gz" else text)
        if self.markdown:
            self.markdown.write_text(markdown, encoding="utf-8")
        if self.picture and draw:
            draw(self.picture)


def write_run(files: Files, out: dict[str, Any], rows: list[Row]) -> None:
    """Write the files and print the tables of a run of these rows."""

    def draw(path: Path) -> None:
        from bench.output import picture

        picture.write(path, out, rows)

    files.write(out, tables.to_markdown(out, tables.tables(out, rows)), draw)
