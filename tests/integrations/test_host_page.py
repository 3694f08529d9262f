"""docs/guides/host.md: its handler, as FedLab's server calls it, beside FedLab's own."""

import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch


def stand_in(name):
    """A module for those that FedLab imports for its data sets and for GPUs alone."""
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda attribute: type(attribute, (), {})
    return module


OF_DATA = ("datasets", "datasets.utils", "transforms", "models")
NAMES = ["pynvml", "torchvision", *(f"torchvision.{each}" for each in OF_DATA)]
with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for each in NAMES:
        patch.setitem(sys.modules, each, stand_in(each))
    try:
        from fedlab.contrib.algorithm.basic_server import AsyncServerHandler
    except ImportError as missing:
        pytest.skip(f"needs FedLab: make test-integrations ({missing})", allow_module_level=True)

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "host.md").read_text()
LAWS = [{"strategy": "constant"}, {"strategy": "polynomial", "a": 0.5}, {"strategy": "hinge", "a": 10, "b": 4}]
pytestmark = pytest.mark.filterwarnings("default")


def handler():
    block = next(each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "WithAfflux" in each)
    names = {}
    exec(compile("from afflux import Server\n" + block, "host.md", "exec"), names)
    return type("Handler", (names["WithAfflux"], AsyncServerHandler), {})


def parameters(module):
    return torch.cat([each.detach().reshape(-1) for each in module.parameters()])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law["strategy"])
def test_the_model_is_that_of_the_host(law):
    """Uploads of staleness 0, 3, 6 and 9. FedLab mixes in float32: an upload rounds four times there, once here."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    ours, theirs = handler()(module, 10), AsyncServerHandler(module, 10)
    for each in (ours, theirs):
        each.setup_optim(0.6, **law)
    sent = [theirs.downlink_package]
    for i in range(10):
        package = sent[max(0, i - 9) if i % 3 == 0 else i]
        upload = [package[0] + 0.1 * torch.randn(package[0].shape), package[1]]
        for each in (ours, theirs):
            each.load(upload)
        packages = ours.downlink_package, theirs.downlink_package
        assert packages[0][1] == packages[1][1] == i + 1
        bound = 5 * (i + 1) * 2.0**-24 * parameters(theirs._model).abs().max().item()
        assert (packages[0][0] - packages[1][0]).abs().max().item() <= bound
        assert torch.equal(packages[0][0], parameters(ours._model))
        sent.append(packages[1])


def test_a_faulty_upload_does_not_end_the_loop():
    ours = handler()(torch.nn.Linear(2, 1), 10)
    ours.setup_optim(0.6)
    params, version = ours.downlink_package
    ours.load([torch.full_like(params, torch.nan), version])
    ours.load([params, torch.full_like(version, torch.nan)])
    assert torch.equal(ours.downlink_package[0], params)
    ours.load([params + 1, ours.downlink_package[1]])
    assert (ours.server.version, ours.server.counts["faulty"]) == (1, 2)
    torch.testing.assert_close(ours.downlink_package[0], params + 0.6)
