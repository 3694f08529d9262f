"""Rules as data: written, read back exactly, or refused; parts of one's own in them."""

import importlib
import json
import pkgutil
import re
import sys
import tomllib
from dataclasses import dataclass, fields, is_dataclass
from math import inf, nan

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import afflux.rules
import steps
from afflux import AffluxError, Rule, codecs
from afflux._engine import CODECS, STEP_KINDS
from afflux.ops.errors import ConfigError
from afflux.rules import ca2fl, fadas, fedbuff, from_config, make, register, registry, schedules, wkafl
from afflux.rules.calibration import CACHED_DIFFERENCE, NONE
from afflux.rules.files import rule_function
from afflux.rules.optimizers import Adagrad, Momentum, Sgd
from afflux.rules.presets.aflguard import DistanceTest
from afflux.rules.presets.dialects import DIALECTS, Dialect, OnePlusRoot, VersionMeans, appfl, flsim, nvflare
from afflux.rules.presets.diloco import DelayedNesterov
from afflux.rules.presets.dp_fedbuff import ClippedMean
from afflux.rules.presets.fltrust import TrustScores
from afflux.rules.presets.gsgm import GradientScheduling
from afflux.rules.presets.krum import Krum
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.presets.zenopp import ScoreTest
from afflux.rules.rule import Calibrate, Needs
from afflux.rules.schedules import ByVersion, DelayAdaptive, MinimumStaleness
from afflux.rules.specs import RuleSpec
from afflux.rules.staleness import Constant, Exponential, Hinge, Inverse, Polynomial
from afflux.rules.weights import Examples, Given, Staleness, Trimmed, Uniform
from conftest import check_error, check_raises
from garbage import DEEP, JSON, nested
from variants import VARIANTS, Mine
from variants import make as make_variant

#: Dataclasses of the package that do not stand in a rule.
NO_PARTS = {Dialect, Needs, registry.Part, RuleSpec}
NAMES = {
    "rule": ["rule"],
    "weigh": [
        "clipped_mean", "cosine_selection", "delayed_nesterov", "distance_test", "examples", "given",
        "gradient_scheduling", "krum", "score_test", "staleness", "trimmed", "trust_scores", "uniform", "version_means",
    ],
    "calibrate": ["calibrate"],
    "step": sorted(STEP_KINDS.keys() - {"assign", "nesterov"}),  # an option of momentum
    "schedule": ["by_version", "delay_adaptive", "minimum_staleness"],
    "staleness": ["constant", "exponential", "hinge", "inverse", "one_plus_root", "polynomial"],
}  # fmt: skip


class Namesake(Uniform):
    """A subclass of a registered part is not registered."""


Namesake.__qualname__ = "Uniform"


def own(weigh_part):
    return Rule("mine", "update", 2, weigh_part, NONE, Sgd(1.0))


def through_json(rule):
    return json.loads(json.dumps(rule.to_config(), allow_nan=False))


def toml(value):
    """A value in TOML, tables inline. JSON's texts, numbers and booleans are TOML's, too; null has no counterpart."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(entry)}" for key, entry in value.items()) + "}"
    assert value is not None, "TOML has no null"
    return json.dumps(value, allow_nan=False)


def configs_of(rule):
    """The rule's configuration as each format returns it."""
    config = rule.to_config()
    yield through_json(rule)
    yield yaml.safe_load(yaml.safe_dump(config))
    yield tomllib.loads("\n".join(f"{key} = {toml(value)}" for key, value in config.items()))


@pytest.fixture
def parts(monkeypatch):
    """The tables of registered parts, as they were before the test afterwards."""
    for table in ("_BY_NAME", "_BY_CLASS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


# Every part has a name, and every rule comes back


def test_every_part_of_the_package_is_registered():
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(afflux.rules.__path__, "afflux.rules.")]
    defined = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
    }
    found = {part.cls: part for part in registry.registered_parts().values()}
    assert defined - set(found) == NO_PARTS
    for role, names in NAMES.items():
        assert sorted(part.name for cls, part in found.items() if cls in defined and part.role == role) == names


DIALECTS_OF_FEDBUFF = [*DIALECTS, nvflare(per_version=True), appfl(num_clients=3), flsim(avg_staleness=2)]
PRESETS = [*map(make_variant, VARIANTS), *(fedbuff(dialect=each) for each in DIALECTS_OF_FEDBUFF)]


@pytest.mark.parametrize("rule", PRESETS, ids=lambda rule: rule.name)
def test_every_preset_comes_back(rule):
    for config in configs_of(rule):
        assert from_config(config) == rule
        assert config == rule.to_config()
    assert "own" not in json.dumps(config)
    assert "afflux" not in json.dumps(config)


@pytest.mark.parametrize("rule", [wkafl(clip=None), wkafl(staleness=False), fedbuff(dialect="appfl"), ca2fl()])
def test_null_of_an_older_configuration_is_still_read(rule):
    text = json.dumps(rule.to_config())
    assert '"none"' in text
    assert from_config(json.loads(text.replace('"none"', "null"))) == rule


def test_a_configuration_is_readable():
    law = {"part": "polynomial", "a": 0.5}
    weigh = {"part": "staleness", "law": law, "normalise": "count", "scale": 1.0, "by_examples": False}
    rows = {"cached": False, "direction": "difference", "divide_by": "all", "codec": "none"}
    calibrate = {"part": "calibrate", **rows, "quantize_direction": False, "factor": 1.0}
    parts = {"weigh": weigh, "calibrate": calibrate, "step": {"part": "sgd", "lr": 1.0}}
    config = fedbuff(buffer_size=2).to_config()
    assert config == {"part": "rule", "name": "fedbuff", "kind": "update", "buffer_size": 2, **parts}
    assert ca2fl(codec="rotated-2").to_config()["calibrate"]["codec"] == "rotated-2"
    assert wkafl(clip=inf).to_config()["weigh"]["clip"] == "inf"
    law = schedules.ByVersion({0: 0.1, 100: 0.01})
    assert fadas(server_lr=law).to_config()["step"]["lr"] == {"part": "by_version", "rates": {"0": 0.1, "100": 0.01}}


def test_what_has_a_default_may_be_left_out():
    parts = {"weigh": {"part": "staleness", "law": "hinge"}, "calibrate": {"part": "calibrate", "cached": True}}
    config = {"part": "rule", "name": "mine", "kind": "update", "buffer_size": 3, **parts, "step": "momentum"}
    assert from_config(config) == Rule("mine", "update", 3, Staleness(Hinge()), CACHED_DIFFERENCE, Momentum())


FINITE = st.floats(allow_nan=False, allow_infinity=False)
NOT_NEGATIVE = st.floats(0, 1e300)
POSITIVE = st.floats(1e-300, 1e300)
BELOW_ONE = st.floats(0, 1, exclude_max=True)
ONE_OR_LESS = st.floats(0, 1)
LAWS = {
    "constant": st.builds(Constant),
    "inverse": st.builds(Inverse),
    "one_plus_root": st.builds(OnePlusRoot),
    "polynomial": st.builds(Polynomial, NOT_NEGATIVE),
    "hinge": st.builds(Hinge, NOT_NEGATIVE, NOT_NEGATIVE),
    "exponential": st.builds(Exponential, st.floats(1, 1e300)),
}
VERSIONS = st.dictionaries(st.integers(0, 2**70), FINITE)
SCHEDULES = {
    "by_version": st.builds(lambda rates, first: ByVersion({**rates, 0: first}), VERSIONS, FINITE),
    "delay_adaptive": st.builds(
        DelayAdaptive, st.deferred(lambda: RATES), st.integers(0, 2**70), st.sampled_from(["inverse", "minimum"])
    ),
    "minimum_staleness": st.builds(MinimumStaleness, st.deferred(lambda: RATES), NOT_NEGATIVE),
}
ANY_LAW, RATES = st.one_of(*LAWS.values()), FINITE | st.one_of(*SCHEDULES.values())
#: The fields of `CosineSelection`.
SELECTION = [ONE_OR_LESS, FINITE, FINITE, st.none() | POSITIVE | st.just(inf), POSITIVE, st.none() | ANY_LAW]
SELECTION += [st.booleans(), st.sampled_from(["estimate", "aggregate"]), st.none() | FINITE]
SELECTION += [st.none() | st.integers(0, 2**70)]
WEIGH = {
    "uniform": st.builds(Uniform),
    "examples": st.builds(Examples),
    "given": st.builds(Given, st.text("ab/_é 1", min_size=1, max_size=64)),
    "staleness": st.builds(Staleness, ANY_LAW, st.sampled_from(["count", "weights", None]), FINITE, st.booleans()),
    "version_means": st.builds(VersionMeans, ANY_LAW),
    "gradient_scheduling": st.builds(GradientScheduling, ONE_OR_LESS),
    "score_test": st.builds(ScoreTest, NOT_NEGATIVE, NOT_NEGATIVE, NOT_NEGATIVE, st.booleans()),
    "cosine_selection": st.builds(CosineSelection, *SELECTION),
    "delayed_nesterov": st.builds(DelayedNesterov, st.integers(1, 2**53), BELOW_ONE),
    "distance_test": st.builds(DistanceTest, NOT_NEGATIVE),
    "krum": st.builds(Krum, st.integers(0, 2**53), st.integers(1, 2**53)),
    "trust_scores": st.builds(TrustScores),
}
WEIGH["trimmed"] = st.builds(Trimmed, st.one_of(*WEIGH.values()), st.floats(0, 0.5))
NOISES = st.just(0.0) | st.floats(1e-6, 1e6)
WEIGH["clipped_mean"] = st.builds(ClippedMean, st.floats(1e-9, 1e9), st.integers(1, 2**30), NOISES)
OF_STEPS = {"lr": RATES, "epsilon": POSITIVE, "initial_v": NOT_NEGATIVE, "bias_correction": st.booleans()}
OF_STEPS["nesterov"] = st.booleans()
STEPS = {
    name: st.builds(step, **{field.name: OF_STEPS.get(field.name, BELOW_ONE) for field in fields(step)})
    for name, step in steps.STEPS.items()
}
STEPS["adagrad"] = st.builds(Adagrad, RATES, BELOW_ONE)  # has no bias to correct
CODEC = st.sampled_from([codecs.named(name) for name in CODECS])
ROUNDED = CODEC.filter(lambda codec: not codec.exact)
DIRECTIONS, DIVISORS = st.sampled_from(["difference", "mean"]), st.sampled_from(["all", "seen"])
ROWS = st.one_of(
    st.builds(Calibrate, st.booleans(), DIRECTIONS, DIVISORS, st.none() | CODEC),
    st.builds(lambda codec: Calibrate(True, codec=codec, quantize_direction=True), ROUNDED),
    st.builds(lambda factor: Calibrate(True, factor=factor), ONE_OR_LESS),
)


def rules_of(weigh=st.one_of(*WEIGH.values()), step=st.one_of(*STEPS.values())):  # noqa: B008
    kind = st.sampled_from(["update", "gradient"])
    rest = st.tuples(st.text(max_size=5), kind, st.integers(1, 2**53), weigh, ROWS, step)
    return rest.filter(lambda of: not (isinstance(of[3], Trimmed | ClippedMean) and of[4].cached)).map(
        lambda of: Rule(*of)
    )


#: Rules with a part, by the part's name.
RULES_WITH = (
    {"rule": rules_of(), "calibrate": rules_of()}
    | {name: rules_of(weigh=weigh) for name, weigh in WEIGH.items()}
    | {name: rules_of(step=step) for name, step in STEPS.items()}
    | {name: rules_of(step=st.builds(Sgd, schedule)) for name, schedule in SCHEDULES.items()}
    | {name: rules_of(weigh=st.builds(Staleness, law)) for name, law in LAWS.items()}
)


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_every_part_comes_back_exactly(name):
    @settings(max_examples=30, deadline=None)
    @given(RULES_WITH[name])
    def play(rule):
        config = through_json(rule)
        again = from_config(config)
        assert f'"part": "{name}"' in json.dumps(config)
        assert again == rule
        assert repr(again) == repr(rule), "-0.0 is not 0.0"

    play()


# What is refused, and in which words


def changed(config, path, value):
    *keys, last = path
    inner = config
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["part"], "sgd", "part is 'sgd', must be a rule; known: rule"),
        (["weigh", "part"], "stalenes", "weigh is 'stalenes', must be a weigh part; did you mean 'staleness'? known: "),
        (["weigh", "part"], "os.system", "weigh is 'os.system', must be a weigh part; known: "),
        (["weigh", "part"], "sgd", "weigh is 'sgd', must be a weigh part; known: "),
        (["weigh", "more"], 1, "weigh ('staleness') has no option 'more'; known: law, normalise, scale, by_examples"),
        (["weigh", 5], 1, "weigh ('staleness') has no option 5; known: law"),
        (["weigh"], {"part": "staleness"}, "weigh.law is missing"),
        (["weigh"], {}, "weigh.part is missing: the name of a weigh part"),
        (["weigh"], {"own": "m.Mine"}, "weigh is 'm.Mine', a part that is not registered"),
        (["weigh"], Uniform(), "weigh is Uniform(), must be a weigh part"),
        (["weigh", "law", "a"], "x", "weigh.law.a is 'x', must be a number"),
        (["weigh", "law", "a"], {"part": "constant"}, "weigh.law.a is {'part': 'constant'}, must be a number"),
        (["weigh", "law", "a"], "nan", "weigh.law: [Polynomial] a is nan, must be finite and not negative"),
        (["weigh", "law", "part"], "uniform", "weigh.law is 'uniform', must be a staleness function; known: constant"),
        (["weigh", "normalise"], "sum", "weigh.normalise is 'sum', must be 'count' or 'weights' or None"),
        (["kind"], "delta", "kind is 'delta', must be 'update' or 'gradient' or 'model'"),
        (["name"], 3, "name is 3, must be a str"),
        (["buffer_size"], 0, "[Rule] buffer_size is 0"),
        (["buffer_size"], 2.5, "buffer_size is 2.5, must be an int"),
        (["calibrate"], None, "calibrate is None, must be a calibrate part"),
        (["calibrate", "codec"], "int8", "calibrate.codec: [codec] 'int8' is unknown; known: float32"),
        (["calibrate", "cached"], 1, "calibrate.cached is 1, must be True or False"),
        (["step", "lr"], "inf", "step: [Sgd] lr is inf, must be a finite number or a law"),
    ],
)
def test_what_from_config_refuses(path, value, message):
    config = changed(fedbuff().to_config(), path, value)
    check_error(rf"^\[(from_config|Rule)\] .*{re.escape(message.removeprefix('[Rule] '))}", from_config, config)


@pytest.mark.parametrize("key", ["part", "name", "kind", "buffer_size", "weigh", "calibrate", "step"])
def test_a_missing_key_is_named(key):
    config = fedbuff().to_config()
    del config[key]
    check_error(rf"\[from_config\] {key} is missing", from_config, config)


@pytest.mark.parametrize("config", [None, 3, "fedbuff", [], {1: 2}, {}])
def test_only_a_mapping_is_a_configuration(config):
    check_error(r"\[from_config\] (config is|part is missing)", from_config, config)


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize(
    "path", [["weigh"], ["weigh", "law"], ["weigh", "part"], ["step", "lr"], ["name"], ["buffer_size"], ["calibrate"]]
)
def test_deep_nesting_is_an_error(path, deep):
    check_error(path[0], from_config, changed(fedbuff().to_config(), path, DEEP[deep]))


def test_so_is_a_rule_that_is_nested_too_deeply():
    limit = registry.MAX_DEPTH
    deepest = nested(DelayAdaptive, depth=limit - 2)
    rule = fedbuff(server_lr=deepest)
    assert from_config(through_json(rule)) == rule
    check_error(f"more than {limit} levels", fedbuff(server_lr=DelayAdaptive(deepest)).to_config)


def paths(config, path=()):
    yield from [path] if path else []
    if isinstance(config, dict):
        for key, value in config.items():
            yield from paths(value, (*path, key))


SOUND = [fedbuff(), ca2fl(codec="affine-2"), wkafl(clip=inf)]
SOUND += [fadas(server_lr=DelayAdaptive(ByVersion({0: 0.1, 7: 0.2})))]
CONFIGS = [rule.to_config() for rule in SOUND]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_change_of_a_configuration_makes_a_rule_or_an_error(data):
    config = json.loads(json.dumps(data.draw(st.sampled_from(CONFIGS))))
    for _ in range(data.draw(st.integers(1, 3))):
        config = changed(config, data.draw(st.sampled_from(list(paths(config)))), data.draw(JSON))
    try:
        rule = from_config(config)
    except AffluxError:
        return
    assert from_config(through_json(rule)) == rule


@settings(max_examples=400, deadline=None)
@given(JSON)
def test_garbage_is_an_error(config):
    check_raises(AffluxError, from_config, config)


def test_reading_imports_nothing_and_changes_nothing(monkeypatch):
    config = changed(fedbuff().to_config(), ["weigh"], {"part": "rules.weights.Uniform", "scale": [1]})
    before, modules = json.dumps(config), set(sys.modules)
    monkeypatch.setattr("builtins.__import__", lambda *args, **kwargs: pytest.fail("an import"))
    check_error(r"rules\.weights\.Uniform", from_config, config)
    check_error("os", make, "os:system")
    assert json.dumps(config) == before
    assert set(sys.modules) == modules


# Parts of one's own


@pytest.mark.parametrize(
    ("part", "name"), [(Mine(), "variants.Mine"), (Namesake(), "test_configuration.Uniform"), (len, "len")]
)
def test_a_part_of_ones_own_leaves_its_name(part, name):
    config = through_json(own(part))
    assert config["weigh"] == {"own": name}
    check_error(rf"\[from_config\] weigh is '{name}', a part that is not registered", from_config, config)


@pytest.mark.usefixtures("parts")
def test_a_part_of_ones_own_may_be_registered():
    register("mine", "weigh")(Mine)
    rule = own(Mine(0.5))
    assert through_json(rule)["weigh"] == {"part": "mine", "clip": 0.5}
    assert from_config(through_json(rule)) == rule
    check_error(r"weigh.clip is 'x', must be a number", from_config, changed(rule.to_config(), ["weigh", "clip"], "x"))
    register("mine", "weigh")(Mine)  # the same class again, as when its file is run again


@pytest.mark.usefixtures("parts")
def test_a_field_of_any_type_comes_back_or_cannot_be_written():
    @register("any", "weigh")
    @dataclass(frozen=True)
    class AnyField:
        value: object = "default"
        name: str = "none"
        optional: str | None = "default"

        def __call__(self, arrivals, /):
            return np.ones(len(arrivals))

    for value in (None, inf, -inf, "infinite", 1, 1.5, True):
        rule = own(AnyField(value, optional=value if isinstance(value, str) else None))
        assert from_config(through_json(rule)) == rule
    for word in ("none", "inf", "-inf", "nan"):
        for part, field in ((AnyField(word), "value"), (AnyField(optional=word), "optional")):
            check_error(rf"\[to_config\] any\.{field} is '{word}', which is read as", own(part).to_config)
    for value in (None, inf, nan, 1):  # None would be read as the text "none"
        check_error(rf"\[to_config\] any\.name is {value}, must be a str", own(AnyField(name=value)).to_config)


@pytest.mark.usefixtures("parts")
def test_errors_of_a_registered_part_name_the_key():
    @register("broken", "weigh")
    @dataclass
    class Broken:
        values: object = None
        law: "Undefined" = 1.0  # noqa: F821

        def __post_init__(self):
            raise KeyError("no") if self.law == 2 else ValueError("not today")

        def __call__(self, arrivals, /):
            return np.ones(len(arrivals))

    config = own(Mine()).to_config()
    with pytest.raises(AffluxError, match=r"weigh \('broken'\) cannot be made: not today"):
        from_config(config | {"weigh": {"part": "broken", "values": "x", "law": {"part": "hinge"}}})
    check_error(r"weigh.values is \[1\], must be a", from_config, config | {"weigh": {"part": "broken", "values": [1]}})


@pytest.mark.usefixtures("parts")
def test_a_file_of_a_rule_may_be_imported_too(tmp_path, monkeypatch):
    """In either order; rules of both modules are written as the same data. Another file's class is refused."""
    text = """
from dataclasses import dataclass
from afflux import Rule, rules
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd

@rules.register("twice_named", "weigh")
@dataclass(frozen=True)
class Twice:
    def __call__(self, arrivals, /):
        return [1.0] * len(arrivals)

def twice():
    return Rule("twice", "update", 2, Twice(), NONE, Sgd(1.0))
"""
    for name in ("imported_rule", "other_rule"):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    imported = importlib.import_module("imported_rule").twice()
    named = rule_function(f"{tmp_path}/imported_rule.py:twice")()
    assert type(named.weigh) is not type(imported.weigh)
    assert named.to_config() == imported.to_config()
    assert from_config(imported.to_config()) == named
    importlib.reload(importlib.import_module("imported_rule"))
    assert from_config(imported.to_config()) != named
    check_error("'twice_named', which .* already", rule_function, f"{tmp_path}/other_rule.py:twice", error=ConfigError)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    ("name", "role", "cls", "message"),
    [
        ("Clipped Mean", "weigh", Mine, "name is 'Clipped Mean', must be in snake_case"),
        (3, "weigh", Mine, "name is 3, must be in snake_case"),
        ("mine", "law", Mine, "role is 'law', must be 'rule', 'weigh'"),
        ("uniform", "weigh", Mine, "name is 'uniform', which <class 'afflux.rules.weights.Uniform'> has already"),
        ("mine", "weigh", len, "'mine' is <built-in function len>, must be a dataclass"),
        ("mine", "weigh", type("Plain", (), {}), "must be a dataclass"),
        ("mine", "weigh", dataclass(type("P", (), {"__annotations__": {"own": int}})), "has a field 'own', which conf"),
    ],
)
def test_what_register_refuses(name, role, cls, message):
    before = registry.registered_parts()
    check_error(re.escape(message), lambda: register(name, role)(cls))
    assert registry.registered_parts() == before
