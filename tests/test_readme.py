"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("source", BLOCKS, ids=range(len(BLOCKS)))
def test_the_readme(source, capsys):
    if "torch" in source:
        pytest.importorskip("torch")
    names = {}
    exec(compile(source, "README.md", "exec"), names)
    for line in re.findall(r"print\(.*\)\s+# (.*)", source):
        assert line in capsys.readouterr().out
    assert names["server"].version == 1
