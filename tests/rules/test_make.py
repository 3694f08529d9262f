"""Presets by name, with plain values and with the names of other frameworks."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import AffluxError, codecs
from afflux.integrations._settings import rule_of
from afflux.rules import RULES, ca2fl, fedbuff, from_config, make, wkafl
from afflux.rules.files import rule_function
from afflux.rules.optimizers import Sgd
from afflux.rules.presets.dialects import appfl, flsim, nvflare
from afflux.rules.schedules import ByVersion, DelayAdaptive
from afflux.rules.staleness import Constant, Hinge
from conftest import check_error, check_raises
from garbage import DEEP, JSON

OPTIONS = [
    "buffer_size", "server_lr", "staleness", "codec", "dialect", "normalise", "clip", "bits", "beta1", "x", "K",
    "alpha", "staleness_fn", "staleness_fn_kwargs", "staleness_weight", "buffer_ratio", "num_clients",
    "beta", "num_malicious_nodes",
]  # fmt: skip


def test_presets_are_made_from_plain_values():
    for name, preset in RULES.items():
        assert make(name) == preset()
    assert make("ca2fl", buffer_size=10, codec="affine-4") == ca2fl(buffer_size=10, codec=codecs.affine(4))
    assert make("fedbuff", staleness="hinge") == fedbuff(staleness=Hinge())
    assert make("fedbuff", staleness={"part": "hinge", "a": 2, "b": 1}) == fedbuff(staleness=Hinge(2.0, 1.0))
    assert make("fedbuff", staleness=Hinge(2.0, 1.0), server_lr=np.float32(0.5)) == fedbuff(
        staleness=Hinge(2.0, 1.0), server_lr=0.5
    )
    rate = {"part": "delay_adaptive", "lr": {"part": "by_version", "rates": {"0": 1, "50": 0.5}}}
    assert make("wkafl", server_lr=rate, clip="inf") == wkafl(
        server_lr=DelayAdaptive(ByVersion({0: 1.0, 50: 0.5})), clip=inf
    )
    assert make("afa_cs", codec=codecs.rotated(2)).calibrate.codec == codecs.named("rotated-2")


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"dialect": "appfl", "num_clients": 4}, {"dialect": appfl(num_clients=4)}),
        ({"dialect": {"part": "appfl", "num_clients": 4}}, {"dialect": appfl(num_clients=4)}),
        ({"dialect": appfl(num_clients=4)}, {"dialect": appfl(num_clients=4)}),
        ({"dialect": "flsim", "avg_staleness": 3}, {"dialect": flsim(avg_staleness=3)}),
        ({"dialect": "nvflare", "per_version": True}, {"dialect": nvflare(per_version=True)}),
        (
            {"dialect": "appfl", "K": 3, "alpha": 0.9, "num_clients": 8, "staleness_fn": "constant"},
            {"dialect": appfl(num_clients=8), "buffer_size": 3, "server_lr": 0.9, "staleness": Constant()},
        ),
        (
            {"dialect": "appfl", "staleness_fn": "hinge", "staleness_fn_kwargs": {"a": 3, "b": 2}},
            {"dialect": "appfl", "staleness": Hinge(3.0, 2.0)},
        ),
        ({"dialect": "appfl", "client_weights_mode": "equal", "gradient_based": False}, {"dialect": "appfl"}),
        (
            {"dialect": "nvflare", "num_updates_for_model": 4, "global_lr": 0.5, "staleness_weight": True},
            {"dialect": "nvflare", "buffer_size": 4, "server_lr": 0.5},
        ),
        (
            {"dialect": "nvflare", "staleness_weight": False, "max_model_history": inf},
            {"dialect": "nvflare", "staleness": Constant()},
        ),
        ({"dialect": "nvflare", "max_model_history": "inf"}, {"dialect": "nvflare"}),
        (
            {"dialect": "flgo", "buffer_ratio": 0.25, "num_clients": 30, "eta": 2},
            {"dialect": "flgo", "buffer_size": 7, "server_lr": 2.0},
        ),
    ],
)
def test_the_names_of_other_frameworks(options, same):
    assert make("fedbuff", **options) == fedbuff(**same)


@pytest.mark.parametrize(
    ("name", "options", "same"),
    [
        ("fedavgm", {"server_learning_rate": 0.5, "server_momentum": 0.8}, {"server_lr": 0.5, "beta": 0.8}),
        ("fedavgm", {"beta": 0.8}, {"beta": 0.8}),
        ("krum", {"num_malicious_nodes": 1, "buffer_size": 5}, {"byzantine": 1, "buffer_size": 5}),
        ("multi_krum", {"num_malicious_nodes": 2, "num_nodes_to_select": 3}, {"byzantine": 2, "keep": 3}),
        ("fedmedian", {}, {}),
        ("fedtrimmedavg", {"beta": 0.29}, {"trim": 0.2}),
        ("fedtrimmedavg", {"beta": 0.29, "buffer_size": 7.0}, {"trim": 2 / 7, "buffer_size": 7}),
        ("fedtrimmedavg", {"buffer_size": 4}, {"trim": 0.2, "buffer_size": 4}),
    ],
)
def test_flowers_names(name, options, same):
    """`beta` is the momentum of afflux's fedavgm, and the share that Flower's FedTrimmedAvg cuts."""
    assert make(name, dialect="flower", **options) == RULES[name](**same)
    assert rule_of("flower", name, options) == RULES[name](**same)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedbuf", {}, r"\[make\] name is 'fedbuf', must be a rule; did you mean 'fedbuff' or 'dp_fedbuff'? known: "),
        (7, {}, "name is 7, must be a rule; known: "),
        ("ca2fl", {"bufer_size": 3}, "ca2fl has no option 'bufer_size'; did you mean 'buffer_size'? known: "),
        ("ca2fl", {"codec": "affine-5"}, "codec: [codec] 'affine-5' is unknown; did you mean 'affine-"),
        ("ca2fl", {"codec": 4}, "codec is 4, must be the name of a codec or None"),
        ("mf_ca2fl", {"codec": "afine"}, "codec is 'afine', must be 'affine' or 'affine-vector' or 'rotated'"),
        ("ca2fl", {"buffer_size": "10"}, "buffer_size is '10', must be an int"),
        ("ca2fl", {"buffer_size": 10**5000}, "buffer_size is an int of more than 300 digits"),
        ("ca2fl", {"buffer_size": 0}, "[Rule] buffer_size is 0, must be an int of at least 1"),
        ("ca2fl", {"server_lr": "sgd"}, "server_lr is 'sgd', must be a number or a schedule of learning rates; known"),
        ("ca2fl", {"server_lr": "by_version"}, "server_lr.rates is missing"),
        ("ca2fl", {"server_lr": Sgd}, "server_lr is <class "),
        ("ca2fl", {"server_lr": {"lr": 1}}, "server_lr.part is missing: the name of a number or a schedule"),
        ("ca2fl", {"server_lr": {"part": "by_version", "rates": {"0": "x"}}}, "server_lr.rates.0 is 'x', must be a nu"),
        ("ca2fl", {"server_lr": {"part": "by_version", "rates": {"1": 1}}}, "server_lr: [ByVersion] rates begins at "),
        ("ca2fl", {"server_lr": {"part": "by_version", "rates": {"0": 1, 0: 1}}}, "server_lr.rates has the key 0, mus"),
        ("ca2fl", {"server_lr": {"part": "by_version", "rates": {"x": 1}}}, "server_lr.rates has the key 'x', must be"),
        ("fedbuff", {"staleness": "hing"}, "must be a staleness function or None; did you mean 'hinge'"),
        ("fedbuff", {"staleness": {"part": "hinge", "c": 1}}, "staleness ('hinge') has no option 'c'; known: a, b"),
        ("fedbuff", {"staleness": {"part": "hinge", "a": -1}}, "staleness: [Hinge] a is -1.0, must be finite and not"),
        ("fedbuff", {"dialect": "nvflair", "K": 1}, "dialect is 'nvflair', unknown; did you mean 'nvflare'? known: pa"),
        ("fedbuff", {"dialect": {"part": "appfl", "num_clients": 0}}, "dialect: [appfl] num_clients is 0"),
        ("fedbuff", {"dialect": {"part": "appfl", "num_clients": 1}, "num_clients": 1}, "num_clients is given twice: "),
        ("fedbuff", {"dialect": 3}, "dialect is 3, must be a dialect"),
        ("fedbuff", {"K": 3}, "K is a name of appfl: only for dialect='appfl'"),
        ("fedbuff", {"dialect": "appfl", "eta": 3}, "eta is a name of flgo: only for dialect='flgo'"),
        ("fedbuff", {"dialect": "appfl", "K": 3, "buffer_size": 3}, "K is the name of buffer_size in appfl: both are"),
        ("fedbuff", {"dialect": "nvflare", "staleness_weight": True, "staleness": None}, "staleness_weight is the "),
        ("fedbuff", {"dialect": "appfl", "staleness_fn_kwargs": {"a": 1}}, "staleness_fn_kwargs is given without stal"),
        ("fedbuff", {"dialect": "appfl", "staleness_fn": "hinge", "staleness_fn_kwargs": 3}, "fn_kwargs is 3, must"),
        ("fedbuff", {"dialect": "appfl", "client_weights_mode": "sample_size"}, "client_weights_mode is 'sample_size'"),
        ("fedbuff", {"dialect": "appfl", "gradient_based": True}, "gradient_based is True, must be False: clients pus"),
        ("fedbuff", {"dialect": "nvflare", "max_model_history": 9}, "max_model_history is 9, must be inf: give it to"),
        ("fedbuff", {"dialect": "nvflare", "staleness_weight": "no"}, "staleness_weight is 'no', must be True or "),
        ("fedbuff", {"dialect": "flgo", "buffer_ratio": 0.1}, "num_clients is missing: buffer_ratio is a share of all"),
        ("fedbuff", {"dialect": "flgo", "buffer_ratio": 2, "num_clients": 1}, "buffer_ratio is 2, must be between 0 a"),
        ("fedbuff", {"dialect": "flgo", "buffer_ratio": 0.1, "num_clients": 10**400}, "num_clients must fit into 64 b"),
        ("fedbuff", {"dialect": "flower"}, "dialect is 'flower', unknown; did you mean 'flgo'? known: pa"),
        ("ca2fl", {"dialect": "flower"}, "ca2fl has no option 'dialect'; known: buffer_size"),
        ("krum", {"num_malicious_nodes": 1}, "num_malicious_nodes is a name of flower: only for dialect='flower'"),
        ("krum", {"dialect": "Flower"}, "dialect is 'Flower', must be 'flower' for krum"),
        ("fedmedian", {"dialect": {"part": "flower"}}, "dialect is {'part': 'flower'}, must be 'flower' for fedmedian"),
        ("krum", {"K": 1}, "krum has no option 'K'; known: buffer_size"),
        ("krum", {"dialect": "flower", "num_malicious_nodes": 1, "byzantine": 1}, "num_malicious_nodes is the name of"),
        ("fedtrimmedavg", {"dialect": "flower", "beta": -0.1}, "beta is -0.1, must be between 0 a"),
        ("fedtrimmedavg", {"dialect": "flower", "beta": 0.7}, "trim is 0.7, must be from 0 to 0.5"),
        ("fedbuff", {"dialect": "flgo", "num_clients": 10}, "fedbuff has no option 'num_clients'; known: buffer_size"),
    ],
)
def test_what_make_refuses(name, options, message):
    check_error(re.escape(message.replace("\\", "")), make, name, **options)


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize("option", ["staleness", "server_lr", "dialect", "buffer_size"])
def test_deep_nesting_is_an_error(option, deep):
    check_error(option, make, "fedbuff", **{option: DEEP[deep]})


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(list(RULES)) | st.text(max_size=5),
    st.dictionaries(
        st.sampled_from(OPTIONS),
        JSON | st.sampled_from(["appfl", "nvflare", "flgo", "flower", "count", "float16"]),
        max_size=4,
    ),
)
def test_any_options_make_a_rule_or_an_error(name, options):
    try:
        rule = make(name, **options)
    except AffluxError:
        return
    assert from_config(json.loads(json.dumps(rule.to_config(), allow_nan=False))) == rule


def test_the_word_none_is_no_value():
    assert make("wkafl", clip="none") == wkafl(clip=None)
    assert make("ca2fl", codec="none") == make("ca2fl")
    check_error("buffer_size is 'none', must be an int", make, "fedbuff", buffer_size="none")


@pytest.mark.parametrize("size", [3.0, np.int8(3), np.array(3), np.float32(3)])
def test_whole_numbers_are_ints(size):
    """As YAML and TOML may have them, and arrays."""
    assert make("fedbuff", buffer_size=size).buffer_size == 3
    config = make("fedbuff", buffer_size=3).to_config()
    assert from_config(config | {"buffer_size": 3.0}) == make("fedbuff", buffer_size=3)


@pytest.mark.parametrize("ends", ["KeyboardInterrupt", "SystemExit(3)"])
def test_a_file_whose_execution_was_interrupted_is_executed_again(ends, tmp_path):
    """Its functions are those of the whole file, also for a thread that asks for them meanwhile."""
    path = tmp_path / "mine.py"
    path.write_text(
        f"""
from pathlib import Path
from time import sleep
from afflux.rules import fedbuff

server_lr = 100.0

def mine():
    return fedbuff(server_lr=server_lr)

started = Path(__file__).with_name("started")
if not started.exists():
    started.touch()
    raise {ends}
sleep(0.2)
server_lr = 0.5
"""
    )
    check_raises((KeyboardInterrupt, SystemExit), rule_function, f"{path}:mine")
    with ThreadPoolExecutor() as threads:
        makers = list(threads.map(rule_function, [f"{path}:mine"] * 2))
    assert [make().step.lr for make in makers] == [0.5, 0.5]
