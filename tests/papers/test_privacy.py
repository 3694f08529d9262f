"""The table of DP-FedBuff by epsilon."""

from dataclasses import replace

import numpy as np
import pytest

from afflux.rules.privacy import epsilon
from afflux.rules.specs import parse_rule
from bench.papers.all_tables import TABLES
from bench.papers.privacy import BUFFER, CLIENTS, DELTA, PARTICIPATIONS, RULES
from bench.papers.reproduction import Budget, reproduce

TINY = {"data": "digits", "num_clients": 12, "concurrency": 4, "arrivals": 48, "eval_every": 12}


def test_the_noise_multipliers_are_the_least_ones():
    pytest.importorskip("dp_accounting")
    noisy = {label: (wanted, noise) for label, (wanted, noise, _, _) in RULES.items() if noise}
    assert len(noisy) == 3
    for label, (wanted, noise) in noisy.items():
        rule = parse_rule(RULES[label][2]).build()
        assert (rule.weigh.noise_multiplier, rule.buffer_size) == (noise, BUFFER)
        less = replace(rule, weigh=replace(rule.weigh, noise_multiplier=round(noise - 0.01, 2)))
        assert epsilon(rule, DELTA) <= wanted < epsilon(less, DELTA)


def test_delta_is_below_one_client_and_all_have_equal_trials():
    table = TABLES["privacy"]
    assert DELTA < 1 / CLIENTS
    assert (len(table.cells), table.count) == (5, 55)
    for cell in table.cells:
        assert cell.settings["arrivals"] == PARTICIPATIONS * CLIENTS
        assert parse_rule(cell.rule).build().needs.participations == (
            None if cell.name == "FedBuff" else PARTICIPATIONS
        )


def test_a_tiny_table_from_trials_to_the_page(tmp_path):
    cells = []
    for cell in TABLES["privacy"].cells[:3]:
        rule = cell.rule.replace(f"={BUFFER}", "=4")
        trials = cell.search._replace(rule=rule, settings={**cell.search.settings, **TINY}, trials=2)
        cells.append(cell._replace(rule=rule, settings={**cell.settings, **TINY}, search=trials))
    table = replace(TABLES["privacy"], cells=tuple(cells), seeds=2)
    page, left = reproduce(table, tmp_path, (0, 1), limits=Budget(processes=1))
    assert (left, [*page.content]) == (0, [*RULES])
    means = {
        label: np.mean([*facts["accuracy"].values()]) for label, facts in page.content.items() if facts["accuracy"]
    }
    assert [*means] == [cell.name for cell in cells]
    assert means["epsilon 8"] < means["FedBuff"]  # with twelve clients the noise is large
    (row,) = [line for line in page.markdown.splitlines() if line.startswith("| epsilon 8 |")]
    assert f"| 1.21 | {100 * means['epsilon 8']:.1f} ± " in row
    assert "| server_lr=" in row
    assert ", clip=" in row
    page.draw(tmp_path / "privacy.png")
    assert (tmp_path / "privacy.png").read_bytes()[:4] == b"\x89PNG"
