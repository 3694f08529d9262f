"""Sphinx configuration: `make docs` writes the site to build/docs."""

import argparse
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import _MockObject

project = "afflux"
author = "the afflux authors"
copyright = "the afflux authors"
release = installed_version("afflux")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Adapters are documented without their frameworks, which are not installed together.
autodoc_mock_imports = ["flwr", "nvflare", "appfl", "flgo", "omegaconf"]
warnings.filterwarnings("ignore", "afflux.integrations", RuntimeWarning)  # mocked frameworks have no versions
_MockObject.__or__ = _MockObject.__ror__ = lambda self, other: self  # annotations such as `Record | None`
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures would hold msgspec's and NumPy's internals; docstrings give shapes and dtypes
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # as above

html_theme = "furo"
html_title = "afflux"
html_static_path, html_css_files = ["_static"], ["site.css"]

ROOT, DOCS = Path(__file__).parents[1], Path(__file__).parent
#: Pages of the site whose text is a file of the repository.
FILES = {
    "background/benchmark": "bench/README.md",
    "reference/changelog": "CHANGELOG.md",
    "background/contributing": "CONTRIBUTING.md",
    "background/peers": "bench/PEERS.md",
    "background/security": "SECURITY.md",
    "index": "README.md",
}
PAGES = {ROOT / file: DOCS / f"{page}.md" for page, file in FILES.items()}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(!\[[^\]]*\])\(([^):\s]+)\)")


def read_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Replaces a page by its file, and links to files that are no pages by their text. Missing files stay links.

    The index is README.md, followed by the lists of pages in index.md.
    """
    file = ROOT / FILES[page] if page in FILES else DOCS / f"{page}.md"
    app.env.note_dependency(str(file), docname=page)
    depth = "../" * page.count("/")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], (file.parent / found[2]).resolve(), found[3] or ""
        target = PAGES.get(target, target)
        if not target.exists() or target.suffix == ".bib":  # the latter is a download
            return found[0]
        if target.suffix == ".md" and target.is_relative_to(DOCS):
            text = "" if text.endswith(".md") else text  # the site shows the title in place of a file name
            return f"[{text}]({depth}{target.relative_to(DOCS)}{anchor})"
        return text

    def image(found: re.Match[str]) -> str:
        target = (file.parent / found[2]).resolve()
        return f"{found[1]}({depth}../{target.relative_to(ROOT)})" if target.exists() else found[0]

    text = file.read_text(encoding="utf-8")
    if page.startswith("results/"):
        text = _with_title_and_picture(page.removeprefix("results/"), text)
    own = {"index": source[0], "reference/commands": options_of_commands() if page == "reference/commands" else ""}
    source[0] = IMAGE.sub(image, LINK.sub(link, text)) + own.get(page, "")


def _with_title_and_picture(name: str, text: str) -> str:
    """Returns a page of results, as `python -m bench.papers` writes it, as an unlisted page of the site."""
    alternative = f"Figures of {name}: the numbers of the table, or the curves of its runs"
    return f"---\norphan: true\n---\n# {name}\n\n{text.replace('### ', '## ')}\n![{alternative}]({name}.png)\n"


def params_of_commands() -> Iterator[tuple[str, list[Any]]]:
    """Yields each command, and its options and arguments, of argparse or, for the simulator's, of typer."""
    import typer

    from afflux.cli import parser
    from afflux.cli.lab.app import app

    waiting, simulators = [("afflux", parser())], typer.main.get_command(app).commands
    while waiting:
        name, command = waiting.pop(0)
        params = command._actions if isinstance(command, argparse.ArgumentParser) else command.params
        groups = [one.choices for one in params if isinstance(one, argparse._SubParsersAction)]
        parts = groups[0] if groups else getattr(command, "commands", {})
        waiting += [(f"{name} {part}", simulators.get(part, one)) for part, one in parts.items()]
        yield name, [one for one in params if getattr(one, "help", None)]


def name_of(param: Any) -> str:
    """Returns an option's first name, or the name of an argument in capitals."""
    names = getattr(param, "option_strings", ()) or getattr(param, "opts", ())
    if names and names[0].startswith("-"):
        return str(names[0])
    return str(param.name if hasattr(param, "name") else param.dest).upper()


def options_of_commands() -> str:
    """Returns a table of the options of each command, from their help; what `run` shares with `compare` stands once."""
    lines, settings = ["", "## Options"], set[tuple[str, str]]()
    for name, params in params_of_commands():
        options = {name_of(one): one for one in params}
        for unlisted in ("-h", "--help", "--version"):
            options.pop(unlisted, None)
        if not options:
            continue
        lines += ["", f"### {name}", "", "| option | default | |", "|---|---|---|"]
        for option, one in options.items():
            default = "" if one.default is None or one.default is False or callable(one.default) else f"`{one.default}`"
            text = re.sub(r"(?<![\w`-])--[\w-]+", r"`\g<0>`", " ".join(one.help.split()))
            if name != "afflux run" or (option, text) not in settings:
                lines.append(f"| `{option}` | {default} | {text.replace('|', '&#124;').replace('<', '&lt;')} |")
            if name == "afflux compare":
                settings.add((option, text))
        if name == "afflux run":
            lines += ["", "Its other options are those of `afflux compare`."]
    return "\n".join([*lines, ""])


def escape_formulas(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Keeps bars and powers of formulas, `|x|` and `2**-53`, from being read as markup."""
    lines[:] = [re.sub(r"(?<!`)(\||\*\*|(?<=\w)_(?=\W|$))(?!`)", r"\\\1", line) for line in lines]


def keep_colons(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Keeps napoleon from reading an attribute's text up to a colon as its type: the first line is an empty comment."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def setup(app: Sphinx) -> None:
    """Registers the transformations of sources and docstrings."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", keep_colons, priority=100)
    app.connect("autodoc-process-docstring", escape_formulas, priority=100)
