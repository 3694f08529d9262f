"""The Python of README.md and of the pages in docs/ runs as it stands, and prints what stands beside it."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from conftest import DOCS, ROOT

#: Pages of other frameworks run in tests/integrations, with the frameworks; the tutorial in test_examples.py.
OF_FRAMEWORKS = re.compile(r"afflux\.(integrations\.(?!torch)|distributed)|^(from|import) pfl\b", re.MULTILINE)
PAGES = [
    page
    for page in [ROOT / "README.md", *DOCS]
    if "```python" in page.read_text() and not OF_FRAMEWORKS.search(page.read_text()) and page.stem != "tutorial"
]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page(page, capsys):
    """The blocks of a page follow one another, as a reader would run them."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    names, promised = {}, []
    for block in blocks:
        for library in re.findall(r"^import (torch|jax)$", block, re.MULTILINE):
            pytest.importorskip(library)
        exec(compile(block, page.name, "exec"), names)
        promised += re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert promised
    assert capsys.readouterr().out.splitlines() == promised


def test_every_pip_install_line_names_extras_that_exist():
    """`make release-check` resolves the extras themselves."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", *DOCS, *(ROOT / "examples").rglob("*.py")]
    lines = [line for page in pages for line in re.findall(r"pip install [^`#\n]*", page.read_text())]
    named = {
        name for line in lines for group in re.findall(r"(?:\.|afflux)\[([\w,]+)\]", line) for name in group.split(",")
    }
    assert named
    assert named <= set(extras)


def test_flowers_example_takes_the_versions_of_the_extra():
    """`flwr run` installs them: those that the tests run with."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flower"]
    example = tomllib.loads((ROOT / "examples" / "flower" / "pyproject.toml").read_text())["project"]["dependencies"]
    ranges = [Requirement(next(t for t in texts if t.startswith("flwr"))).specifier for texts in (extras, example)]
    assert ranges[0] == ranges[1]
    tested = re.search(r"^flwr\S*==(.+)$", (ROOT / ".ci" / "frameworks.txt").read_text(), re.MULTILINE)
    assert all(version in ranges[0] for version in ("1.41.0", tested[1]))
