"""The configuration of APPFL's aggregator, versions of APPFL, and the page."""

import importlib
import re
import shutil
from pathlib import Path

import appfl
import numpy as np
import pytest
import torch
from appfl.misc.utils import create_instance_from_file
from omegaconf import OmegaConf

from afflux import AffluxError
from afflux.integrations import appfl as adapter
from afflux.integrations.appfl import AffluxAggregator
from afflux.rules import ca2fl, fadas, fedasync, fedbuff, make
from appfl_here import Net, aggregator, counted, flat, moved
from conftest import check_error

ROOT = Path(__file__).parents[2]


def test_rules_from_configurations():
    assert aggregator(rule="fedbuff", K=3).server.rule == fedbuff(buffer_size=3)
    assert AffluxAggregator(Net(), {"rule": "fedasync", "alpha": 0.25}).server.rule == fedasync(alpha=0.25)
    assert aggregator(rule="ca2fl", alpha=0.5).server.rule == ca2fl(buffer_size=2, server_lr=0.5)
    text = OmegaConf.create("{K: 4, alpha: 0.5, staleness_fn: hinge, staleness_fn_kwargs: {a: 5, b: 2}}")
    law = {"part": "hinge", "a": 5, "b": 2}
    assert AffluxAggregator(Net(), text).server.rule == make("fedbuff", buffer_size=4, server_lr=0.5, staleness=law)
    whole = AffluxAggregator(Net(), {"rule": fadas(buffer_size=3).to_config()})
    assert whole.server.rule == fadas(buffer_size=3)
    by_default = AffluxAggregator(Net(), OmegaConf.create({"optimize_memory": False}))
    assert by_default.server.rule == fedbuff()


def test_equal_weights_are_equal():
    def run(**configs):
        own = aggregator(rule="fedavg", K=2, **configs)
        for client, size in ((1, 1), (2, 99)):
            own.set_client_sample_size(client, size)
        held = {client: own.get_parameters(client_id=client) for client in (1, 2)}
        for client, value in ((1, 0.0), (2, 2.0)):
            result = own.aggregate(client, moved(held[client], value))
        return (flat(result) - flat(held[1])).mean()

    assert run(client_weights_mode="equal") == pytest.approx(1.0, abs=1e-6)
    assert run(client_weights_mode="sample_size") == run() == pytest.approx(1.98, abs=1e-6)
    lacks = aggregator(rule="fedavg", client_weights_mode="equal")
    lacks.aggregate(1, moved(lacks.get_parameters(client_id=1), 1.0))
    assert lacks.counts["joined"] == 1


def test_a_late_step_is_made_after_a_push():
    own = aggregator(rule="fedbuff", K=9, server_options={"flush_after": 1e-9})
    own.aggregate(1, moved(own.get_parameters(client_id=1), 1.0))
    assert own.server.version == 1


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"rule": "fedbufff"}, "must be a rule"),
        ({"staleness": "linear"}, "staleness"),
        ({"buffer_size": 3}, "K is the name of buffer_size"),
        ({"poll_interval": 1}, "no option 'poll_interval'"),
        ({"K": "many"}, "buffer_size"),
        ({"server_options": {"faults": "raise"}}, 'faults="raise"'),
        ({"server_options": {"inplace": True}}, "inplace=True"),
        ({"server_options": {"stalenes": 3}}, "server_options"),
        ({"gradient_based": True}, "send_gradient"),
        ({"use_secure_agg": True}, "use_secure_agg"),
        ({"client_weights_mode": "other"}, "client_weights_mode"),
        ({"dialect": "appfl", "client_weights_mode": "sample_size"}, "client_weights_mode"),
        ({"rule": "ca2fl", "num_clients": None}, "num_clients is missing"),
        ({"rule": "ca2fl", "num_clients": 1}, "exceeds num_clients"),
        ({"rule": "wkafl"}, "client_lr is missing"),
        ({"timeout": 0}, "timeout"),
        ({"metrics": "val_loss"}, "metrics"),
        ({"num_clients": 0}, "num_clients"),
        ({"model": [np.zeros(3)]}, "torch module"),
        ({"rule": {"part": "rule"}}, "given whole"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_configuration_is_refused(configs, message):
    check_error(re.escape(message), aggregator, **configs)


def test_a_configuration_is_a_mapping():
    check_error(r"aggregator_configs is \['fedbuff'\], must be a mapping", AffluxAggregator, Net(), ["fedbuff"])


def test_rules_that_take_gradients():
    own = aggregator(rule="wkafl", client_lr=0.1, num_clients=4)
    for client in range(4):
        steps = {} if client == 3 else {"current_local_steps": 5}
        own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0), **steps)
    assert counted(own) == {"joined": 3, "faulty": 1}
    assert "local_steps" in own.server.faults[0].reason


MODEL_FILE = """
import torch

class Small(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(size))

def small(size=2):
    return Small(size)
"""


def test_the_model_of_the_configuration(tmp_path):
    """`aggregator_path` passes no model: it is made as APPFL's ServerAgent makes it."""
    path = tmp_path / "small.py"
    path.write_text(MODEL_FILE)
    state = torch.get_rng_state()
    named = AffluxAggregator(
        aggregator_configs={
            "model_configs": {"model_path": str(path), "model_name": "Small", "model_kwargs": {"size": 3}}
        }
    )
    by_function = AffluxAggregator(aggregator_configs={"model_configs": {"model_path": str(path), "seed": 1}})
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(42)
    assert torch.equal(named.get_parameters()["w"], torch.randn(3))
    torch.manual_seed(1)
    assert torch.equal(by_function.get_parameters()["w"], torch.randn(2))
    check_error("there is no model", AffluxAggregator, aggregator_configs={"K": 2})
    with pytest.raises(AffluxError, match="gives no model"):
        AffluxAggregator(aggregator_configs={"model_configs": {"model_path": str(tmp_path / "none.py")}})


def test_another_version_of_appfl_warns(monkeypatch):
    monkeypatch.setattr(appfl, "__version__", "1.13.0")
    with pytest.warns(RuntimeWarning, match=r"tested with appfl 1\.12; 1\.13\.0 is installed"):
        importlib.reload(adapter)


def test_the_page_runs(tmp_path, capsys):
    """Its Python and its configuration, which are one run."""
    page = (ROOT / "docs" / "guides" / "appfl.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(second, "appfl.md", "exec"), {})
    assert capsys.readouterr().out == "1 0\n"
    (tmp_path / "aggregator.py").write_text(first)
    shutil.copy(ROOT / "examples" / "appfl" / "model.py", tmp_path)
    (config,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    server = OmegaConf.create(config.replace("aggregator.py", f"{tmp_path}/aggregator.py")).server_configs
    server.aggregator_kwargs.model_configs.model_path = str(tmp_path / "model.py")
    server.aggregator_kwargs.num_clients = server.num_clients
    made = create_instance_from_file(
        server.aggregator_path, server.aggregator, aggregator_configs=server.aggregator_kwargs, logger=None
    )
    assert made.server.rule == ca2fl(buffer_size=5)
    assert made.server.options.num_clients == 10


def test_the_module_itself_is_an_aggregator_path(tmp_path):
    """APPFL runs the file once more, under the name of its own package."""
    (tmp_path / "small.py").write_text(MODEL_FILE)
    configs = OmegaConf.create({"K": 3, "model_configs": {"model_path": str(tmp_path / "small.py")}})
    made = create_instance_from_file(adapter.__file__, "AffluxAggregator", aggregator_configs=configs, logger=None)
    assert made.server.rule == fedbuff(buffer_size=3)
