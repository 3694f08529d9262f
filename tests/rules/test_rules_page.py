"""docs/reference/rules.md has one line per preset, and the bytes and sweeps in it are true."""

import re
from inspect import signature

import numpy as np
import pytest

from afflux import Server, ops
from afflux.rules import EXPERIMENTAL, RULES
from afflux.rules.schedules import DelayAdaptive
from conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "rules.md").read_text()
ROWS = {
    row[0].strip("`"): row
    for row in (re.split(r" (?<!\\)\| ", line[2:]) for line in PAGE.splitlines() if line[:3] == "| `")
}
SIZE, CLIENTS = 64, 7


def test_every_preset_has_its_line():
    assert list(ROWS) == list(RULES)


def test_rules_whose_authors_code_was_not_seen_say_so():
    texts = {name: " ".join(preset.__doc__.split()) for name, preset in RULES.items()}
    assert {name for name, text in texts.items() if "authors' code was not seen" in text} == {*EXPERIMENTAL}
    (line,) = re.findall(r"^- (.*?)`rules\.EXPERIMENTAL`", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == {*EXPERIMENTAL}


@pytest.mark.parametrize(("name", "option"), [("fadas", "delay_adaptive"), ("wkafl", "stage_two_version")])
def test_what_is_off_by_default_is_named_with_its_option(name, option):
    """A rate that adapts to delays, and a second stage: in the table of README.md, and in the rule's docstring."""
    assert signature(RULES[name]).parameters[option].default is None
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| `{name}` "))
    assert f"`{option}" in line
    assert option in RULES[name].__doc__
    assert "default" in RULES[name].__doc__


def test_that_fadas_does_not_adapt_its_rate_by_default_is_said_with_how_to_switch_it_on():
    """On the page, by `afflux rules` and by `afflux rules fadas`."""
    assert RULES["fadas"]().step.lr == 0.001
    assert RULES["fadas"](delay_adaptive="inverse").step.lr == DelayAdaptive(0.001, 1, "inverse")
    assert "by default with a constant eta" in ROWS["fadas"][2]
    assert '`delay_adaptive="inverse"`' in RULES["fadas"].__doc__.partition("\n")[0]
    assert "By default the learning rate does not adapt to delays" in RULES["fadas"].__doc__


@pytest.mark.parametrize("name", RULES)
def test_a_line(name, monkeypatch):
    rule = RULES[name]()
    _, kind, _, state, sweeps, paper = ROWS[name]
    assert kind == rule.kind
    assert re.search(r"\d{4}, (Algorithm|eq|as in)", paper)
    clients = max(CLIENTS, rule.buffer_size)
    server = Server(rule, np.ones(SIZE, np.float32), num_clients=clients)
    for memory in rule.needs.handed_in:
        server.set_rule_vector(memory, np.ones(SIZE))
    asked = []

    def noted(call):
        return lambda *args, **kwargs: asked.append(1) or call(*args, **kwargs)

    for operation in ("gram", "inner"):
        monkeypatch.setattr(ops, operation, noted(getattr(ops, operation)))
    for client in range(2 * clients):
        server.push(
            client=client % clients, **{server.rule.kind: np.full(SIZE, 0.5 + client / 64)}, version=server.version
        )
    row = 0 if server.rows is None else server.rows.codec.row_bytes(SIZE)
    expected = eval(state.strip("`"), {"d": SIZE, "M": rule.buffer_size, "N": clients, "row": row})
    assert server.state_bytes == expected
    rounds = server.version
    assert len(asked) == rounds * (int(sweeps) - 1)
