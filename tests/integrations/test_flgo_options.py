"""The rule and the options of FLGo's server, and versions of FLGo."""

import json
import re
from inspect import signature
from pathlib import Path

import pytest

import flgo_points  # noqa: F401  # first: it skips these tests where FLGo is not installed
from afflux import rules
from afflux.integrations.flgo import algorithm
from afflux.rules import fedbuff
from conftest import check_error
from flgo_points import flgo
from flgo_runs import in_a_folder, started  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # FLGo's and torch's own

ROOT = Path(__file__).parents[2]


def test_rules_from_configurations():
    """In the call or in FLGo's options, from JSON or YAML, in FLGo's names or afflux's."""
    config = json.loads('{"name": "ca2fl", "buffer_ratio": 0.5, "eta": 0.25, "codec": "affine-8"}')
    runner = started(algorithm(config))
    expected = rules.make("ca2fl", buffer_size=3, server_lr=0.25, codec="affine-8")
    assert runner.server.rule == expected
    Path("options.yml").write_text("rule:\n  name: ca2fl\n  buffer_ratio: 0.5\n  eta: 0.25\n  codec: affine-8\n")
    assert started(algorithm(), **flgo.utils.fflow.load_configuration("options.yml")).server.rule == expected
    assert started(algorithm(), rule=expected.to_config()).server.rule == expected
    assert started(algorithm(), rule={"name": "fedbuff", "buffer_size": 2}).server.rule == fedbuff(buffer_size=2)
    for wrong, message in [
        ({"buffer_ratio": 0.5}, "must be a Rule, its name and options, or a Rule.to_config()"),
        ({"name": "fedbuff", "buffer_ratio": 0.01}, "buffer_size"),
        ({"name": "fedbuff", "buffer_size": 7}, "buffer_size is 7 of 6 clients"),
    ]:
        check_error(re.escape(message), started, algorithm(wrong))


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"server_options": {"flush_after": 1.0}}, {}, "flush_after is in seconds, and FLGo's time is virtual"),
        ({}, {"save_checkpoint": "c"}, "save_checkpoint keeps the model alone"),
        ({}, {"load_checkpoint": "c"}, "load_checkpoint keeps the model alone"),
        ({}, {"algo_para": [0.1, 1.0]}, "algo_para holds numbers by their place"),
        ({}, {"num_parallels": 2}, "give parallel_type='t'"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, options, message):
    check_error(re.escape(message), lambda: started(algorithm(fedbuff(buffer_size=2), **settings), **options))


def test_a_setting_of_another_name_is_refused():
    check_error("argument 'concurrency'", algorithm, fedbuff(buffer_size=2), concurrency=3, error=TypeError)
    shared = {"store", "timeout", "max_failures", "num_threads", "roles", "server_options", "noise_key_file"}
    assert {*signature(algorithm).parameters} == {"rule", "client", *shared}  # as help() shows them
    default = algorithm(fedbuff(buffer_size=2), store=None, timeout=None, server_options=None).Server.settings
    assert default == algorithm(fedbuff(buffer_size=2)).Server.settings


def test_another_version_of_flgo_is_warned_of(monkeypatch):
    monkeypatch.setattr("afflux.integrations.flgo.version", lambda name: "0.5.0")
    with pytest.warns(RuntimeWarning, match=r"tested with flgo 0.4.4; 0.5.0 is installed"):
        algorithm(fedbuff())
