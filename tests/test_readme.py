"""The Python of README.md and of the pages in docs/ runs as it stands, and prints what stands beside it."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT

#: Pages of other frameworks run beside them, in tests/integrations.
OF_FRAMEWORKS = re.compile(r"afflux\.integrations|^(from|import) pfl\b", re.MULTILINE)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python" in page.read_text() and not OF_FRAMEWORKS.search(page.read_text())
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


@pytest.mark.parametrize("rule", ["fedbuff", "fedasync", "ca2fl", "wkafl"])
def test_the_example_runs_with_any_rule(rule):
    """The same file, and one word of its command line."""
    pytest.importorskip("sklearn")
    options = [] if rule == "fedasync" else ["--option", "buffer_size=5"]
    options += ["--option", "server_lr=0.5"] if rule == "wkafl" else []
    command = [sys.executable, ROOT / "examples" / "own_loop.py", rule, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    name, accuracy = re.fullmatch(r"(\w+): \d+ versions, accuracy (0\.\d+)\n", done.stdout).groups()
    assert name == rule
    assert float(accuracy) > 0.85
