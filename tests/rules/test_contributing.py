"""The example of CONTRIBUTING.md works as it stands, and keeps the contract."""

import re

import numpy as np

import oracle
from afflux import Server
from conftest import ROOT, bits, push_all
from test_exact_path import offences

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
(SOURCE,) = re.findall(
    r"<!-- tests/rules/test_contributing.py runs this block -->\n```python\n(.*?)```", TEXT, re.DOTALL
)


def test_the_example_rule(rng):
    names = {"__name__": "example"}
    exec(compile(SOURCE, "CONTRIBUTING.md", "exec"), names)
    assert not list(offences(SOURCE))

    updates = [rng.standard_normal(300).astype(np.float32) * scale for scale in (0.001, 1, 100)]
    start = rng.standard_normal(300).astype(np.float32)
    clipped = [u * min(1, 0.5 / np.linalg.norm(u.astype(np.float64))) for u in updates]
    expected = start + np.sum(clipped, axis=0, dtype=np.float64) / 3

    results = set()
    for order in ([0, 1, 2], [2, 0, 1]):
        server = Server(names["clipped_fedbuff"](clip=0.5, buffer_size=3), start)
        push_all(server, order, lambda i: updates[i], version=0)
        assert np.all(np.abs(server.params - expected) <= oracle.U32 * np.abs(expected) * (1 + 1e-6) + 1e-12)
        results.add(bits(server.params))
    assert len(results) == 1
