"""What adapters share beside the run: rules of configurations, warnings of versions, means of metrics."""

import re
import warnings
from math import inf

import pytest

from afflux.integrations._frameworks import warn_of_version
from afflux.integrations._reading import finite_number, means_of
from afflux.integrations._settings import RunSettings, rule_of
from afflux.rules import ca2fl, fadas, fedasync, fedbuff, fedtrimmedavg, make
from conftest import check_error


@pytest.mark.parametrize(
    ("framework", "rule", "options", "expected"),
    [
        ("flgo", fadas(buffer_size=3), {}, fadas(buffer_size=3)),
        ("appfl", fadas(buffer_size=3).to_config(), {}, fadas(buffer_size=3)),
        ("appfl", "ca2fl", {"K": 3, "alpha": 0.5}, ca2fl(buffer_size=3, server_lr=0.5)),
        ("appfl", "ca2fl", {"buffer_size": 3, "alpha": 0.5}, ca2fl(buffer_size=3, server_lr=0.5)),
        ("appfl", "fedasync", {"alpha": 0.25}, fedasync(alpha=0.25)),  # which is its own
        ("nvflare", "ca2fl", {"num_updates_for_model": 3, "global_lr": 0.5}, ca2fl(buffer_size=3, server_lr=0.5)),
        ("flgo", "ca2fl", {"buffer_ratio": 0.5, "eta": 0.5}, ca2fl(buffer_size=4, server_lr=0.5)),
        ("flgo", {"name": "ca2fl", "buffer_ratio": 0.5, "eta": 0.5}, {}, ca2fl(buffer_size=4, server_lr=0.5)),
        ("nvflare", "ca2fl:num_updates_for_model=3:global_lr=0.5", {}, ca2fl(buffer_size=3, server_lr=0.5)),
        ("flower", "fedtrimmedavg:beta=.2:server_learning_rate=1e-1", {}, fedtrimmedavg(trim=0.2, server_lr=0.1)),
        ("AsyncStrategy", "fadas:buffer_size=3", {}, fadas(buffer_size=3)),
        ("flgo", "fedbuff", {"buffer_ratio": 0.5, "num_clients": 6}, fedbuff(buffer_size=3)),
        ("flgo", "fedbuff", {"dialect": "flgo", "eta": 0.5}, fedbuff(server_lr=0.5, dialect="flgo")),
        (
            "appfl",
            "fedbuff",
            {"dialect": "appfl", "K": 3, "client_weights_mode": "equal"},
            make("fedbuff", dialect="appfl", buffer_size=3, num_clients=8),
        ),
        (
            "nvflare",
            "fedbuff",
            {"dialect": "nvflare", "staleness_weight": False},
            make("fedbuff", dialect="nvflare", staleness="constant"),
        ),
    ],
)
def test_rules_of_configurations(framework, rule, options, expected):
    before = dict(options)
    assert rule_of(framework, rule, options, num_clients=8) == expected
    assert options == before


@pytest.mark.parametrize(
    ("framework", "rule", "options", "message"),
    [
        ("flgo", None, {}, "[flgo] rule is None, must be a Rule, its name and options, or a Rule.to_config()"),
        ("appfl", {}, {}, "[appfl] rule is {}, must be a Rule"),
        ("appfl", "fedbufff", {}, "must be a rule"),
        ("appfl", fedbuff().to_config(), {"K": 3}, "[appfl] ['K']: a rule that is given whole has its options inside"),
        ("flgo", fedbuff(), {"eta": 1.0}, "[flgo] ['eta']: a rule that is given whole has its options inside"),
        ("appfl", "ca2fl", {"K": 3, "buffer_size": 3}, "K is the name of buffer_size in appfl: both are given"),
        ("nvflare", "fedbuff:buffer_size=3", {"buffer_size": 5}, "an option of fedbuff is given twice"),
        ("nvflare", "fedbuff:buffer_size=3:buffer_size=4", {}, "an option of fedbuff is given twice"),
        ("nvflare", {"name": "fedbuff", "buffer_size": 3}, {"buffer_size": 5}, "an option of fedbuff is given twice"),
        ("appfl", "ca2fl", {"global_lr": 1.0}, "global_lr is a name of nvflare"),
        ("appfl", "ca2fl", {"staleness_fn": "hinge"}, "ca2fl has no option 'staleness'"),
        ("appfl", "ca2fl", {"dialect": "appfl", "K": 3}, "ca2fl has no option 'dialect'"),
        ("nvflare", "fedbuff", {"staleness_weight": False}, "staleness_weight is a name of nvflare: only for dialect"),
    ],
)
def test_what_describes_no_rule_is_refused(framework, rule, options, message):
    check_error(re.escape(message), rule_of, framework, rule, options)


def test_settings_that_have_no_meaning_are_other_arguments():
    settings, others = RunSettings.split({"timeout": 3.0, "seed": 5, "K": 2}, without=("seed",))
    assert settings == RunSettings(timeout=3.0)
    assert others == {"seed": 5, "K": 2}


@pytest.mark.parametrize(
    ("tested", "found", "warns"),
    [("1.12", "1.12.3", False), ("1.12", "1.120.0", True), ("0.4.4", "0.4.4", False), ("0.4.4", "0.4.3", True)],
)
def test_versions_that_an_adapter_is_not_tested_with_are_warned_of(tested, found, warns):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_of_version("appfl", tested, found)
    said = f"afflux.integrations.appfl is tested with appfl {tested}; {found} is installed"
    assert [str(each.message) for each in seen] == [said] * warns


def test_means_of_metrics():
    reports = [{"loss": 2.0, "n": 1}, {"loss": 4.0, "accuracy": 0.5, "n": 3}]
    assert means_of(reports) == {"loss": 3.0, "accuracy": 0.5, "n": 2.0}
    assert means_of(reports, "n") == {"loss": 3.5, "accuracy": 0.5}
    assert means_of([{"large": 1.7e308, "small": 1.0}] * 2) == {"small": 1.0}
    assert means_of([]) == {}


def test_finite_numbers():
    assert [finite_number(value) for value in (1, 2.5, inf, "3", None, True, 10**400)] == [1.0, 2.5] + [None] * 5
