"""Where the results of a run go: JSON, Markdown and pictures, each to its own file or all into one folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from afflux.bench import tables
from afflux.bench.row import Row


@dataclass(frozen=True)
class Files:
    json: Path | None = None
    markdown: Path | None = None
    picture: Path | None = None
    folder: Path | None = None  #: all of them, under names of their own; made if it is not there

    def check(self) -> None:
        """Before the run, not after it."""
        for path in (self.json, self.markdown, self.picture, self.folder):
            if path and not path.absolute().parent.is_dir():
                raise typer.BadParameter(f"there is no folder for {path}")
        if self.picture or self.folder:
            try:
                import matplotlib  # noqa: F401
            except ModuleNotFoundError:
                raise typer.BadParameter("a picture needs matplotlib: pip install 'afflux[sim]'") from None

    def write(self, out: dict[str, Any], rows: list[Row]) -> None:
        if self.folder:
            self.folder.mkdir(exist_ok=True)
            inside = (self.folder / name for name in ("bench.json", "bench.md", "bench.png"))
            Files(*inside).write(out, rows)
        if self.json:
            self.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        if self.markdown:
            self.markdown.write_text(tables.to_markdown(out, rows), encoding="utf-8")
        if self.picture:
            from afflux.bench import picture

            picture.write(self.picture, out, rows)
