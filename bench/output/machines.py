"""A table and pictures of each machine's run: a folder has one JSON file of results for each machine."""

import json
from pathlib import Path
from typing import Any

from bench.output.report import FORMAT
from bench.output.tables import summary, to_markdown
from bench.spec.row import Row

#: The lines of a page between which its tables are.
BEGIN, END = "<!-- machines -->\n", "<!-- end of machines -->"


def markdown(folder: Path, known: list[Row], page: Path | None = None) -> str:
    """Return the tables of all results in a folder; for a page, draw and link their pictures.

    Raises:
        ValueError: there are no results, or a file is none of this version's.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} has no results: python -m bench --json {folder / 'NAME.json'} writes some")
    return "\n".join(_of_machine(path, known, page) for path in paths)


def write(page: Path, folder: Path, known: list[Row]) -> None:
    """Replace the tables of a page by those of all results in a folder, and draw the pictures beside the results.

    Raises:
        ValueError: as `markdown`, or the page has no place for the tables.
    """
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no lines {BEGIN.strip()} and {END}")
    page.write_text(f"{before}{BEGIN}{markdown(folder, known, page)}\n{END}{after}", encoding="utf-8")


def _of_machine(path: Path, known: list[Row], page: Path | None) -> str:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["format"] == FORMAT:
            names = {row["name"] for row in run["rows"]}
            rows = [row for row in known if row.name in names]
            text = f"### {path.stem}\n\n{to_markdown(run, [summary(rows, run['cases'])])}"
            return text + _pictures(path, run, rows, page) if page else text
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} holds no results of format {FORMAT}: python -m bench --json writes them")


def _pictures(path: Path, run: dict[str, Any], rows: list[Row], page: Path) -> str:
    from bench.output import picture

    pictures = picture.write(path.with_suffix(".png"), run, rows)
    alternative = f"GB/s of each operation on {path.stem}: afflux, torch, and the machine's limit"
    return "".join(f"\n![{alternative}]({file.relative_to(page.parent)})\n" for file in pictures)
