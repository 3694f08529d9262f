"""The documentation: links lead somewhere, the site builds without a warning, and its API reference is complete."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

import afflux
import afflux.lab
import afflux.sim
import afflux.store
from afflux.cli.lab.app import app
from afflux.rules import presets
from conftest import DOCS, ROOT

TEXTS = [*ROOT.glob("*.md"), *DOCS, *(ROOT / "bench").glob("*.md")]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_links_lead_to_files(text):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text.read_text(encoding="utf-8"))
    assert not [link for link in links if not (text.parent / link).exists()]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", ROOT / "docs", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_other_code_reads_no_private_name_of_a_server():
    """Adapters, simulator, command line and examples use what docs/api lists."""
    folders = [ROOT / "python/afflux" / name for name in ("integrations", "sim", "lab", "cli")] + [ROOT / "examples"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 80
    private = re.compile(r"\bserver\._\w+")
    assert [f"{path}: {name}" for path in files for name in private.findall(path.read_text(encoding="utf-8"))] == []
    assert private.findall("self.server._adapter.layout") == ["server._adapter"]


MODULES = [afflux, afflux.rules, afflux.ops, afflux.codecs, afflux.store, afflux.sim, afflux.lab]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_reference_holds_every_public_name(site, module):
    """By the anchors of its pages."""
    anchors = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    modules = {name for name in module.__all__ if isinstance(getattr(module, name), ModuleType)}
    names = set(module.__all__) - modules - {"__version__"}
    assert not [name for name in sorted(names) if f'.{name}"' not in anchors]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_class_has_a_docstring_of_its_own(module):
    """Not that of Python's ValueError, for example."""
    classes = [value for name in module.__all__ if isinstance(value := getattr(module, name), type)]
    assert [cls.__name__ for cls in classes if not vars(cls).get("__doc__")] == []


def test_texts_of_attributes_are_whole(site):
    """A colon ends none of them: what is before it is not a type."""
    pages = [page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html")]
    assert not [page for page in pages if ">Type<span" in page]
    assert not [page for page in pages if "|---" in page], "a table of Markdown in a docstring"
    assert any("are sound: then later bits do not change" in page for page in pages)


def test_the_page_of_commands_has_every_option(site):
    """Also those that a short help leaves out."""
    page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    compare = typer.main.get_command(app).commands["compare"]
    options = [option.opts[0] for option in compare.params if option.name != "help"]
    assert len(options) > 30
    options += ["--shards", "--memory-budget", "PATH"]  # of the core's commands
    assert [option for option in options if f">{option}<" not in page] == []


def test_pictures_have_alternative_texts(site):
    """Of several words: a name of a file says nothing."""
    pictures = [
        tag for page in site.rglob("*.html") for tag in re.findall(r"<img\b[^>]*_images[^>]*>", page.read_text("utf-8"))
    ]
    assert len(pictures) > 30
    assert [tag for tag in pictures if len(re.search(r'alt="([^"]*)"', tag)[1].split()) < 5] == []


def test_every_page_is_reached(site):
    """From the list of pages on the left."""
    index = (site / "index.html").read_text(encoding="utf-8")
    paths = {page.relative_to(ROOT / "docs").with_suffix("") for page in DOCS} - {Path("index")}
    assert [path for path in sorted(paths) if f'href="{path}.html"' not in index] == []


def test_every_page_of_results_is_linked():
    """From a page in docs: the site's list does not have them."""
    links = {link for page in DOCS for link in re.findall(r"results/([\w-]+\.md)\)", page.read_text(encoding="utf-8"))}
    pages = {page.name for page in (ROOT / "docs/results").glob("*.md")}
    assert len(pages) > 25
    assert pages - links == set()


def test_every_rule_has_an_entry_of_its_paper():
    page = (ROOT / "docs/reference/references.md").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\w+),$", (ROOT / "docs/reference/references.bib").read_text(encoding="utf-8"), re.M)
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| ") and "`" in row]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    cited = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    assert set(presets.RULES) <= named
    assert sorted(cited) == sorted(entries)
