"""APPFL's aggregator: against FedBuffAggregator, replayed to the same bits, and the models that clients get."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from appfl.algorithm.aggregator import FedBuffAggregator
from omegaconf import OmegaConf

from afflux import Join
from afflux.integrations.appfl import AffluxAggregator
from afflux.rules import fedbuff
from afflux.rules.weights import Given
from appfl_here import Net, aggregator, flat, moved, params

U32 = 2.0**-24
IDS = [2**63 + 7, "ann", -3, 2**64 - 1]


@pytest.mark.parametrize(
    "law", [("constant", {}), ("polynomial", {"a": 0.5}), ("hinge", {"a": 10, "b": 1})], ids=lambda law: law[0]
)
def test_the_dialect_equals_fedbuff_of_appfl(law, rng):
    """Theirs rounds each of K differences, their products and sums to float32; ours the result. An earlier error is
    multiplied by |1 - sum of the weights|, which is at most 1.
    """
    size, clients, alpha = 4, 5, 0.9
    settings = {
        "K": size,
        "alpha": alpha,
        "staleness_fn": law[0],
        "staleness_fn_kwargs": law[1],
        "num_clients": clients,
    }
    ours = aggregator(dialect="appfl", **settings)
    theirs = FedBuffAggregator(Net(), OmegaConf.create({**settings, "optimize_memory": False}))
    for own in (ours, theirs):
        for client in range(clients):
            own.get_parameters(client_id=client)
    allowed, stale = 0.0, False
    names = [*Net().state_dict()]
    for step in range(8 * size):
        client = int(rng.integers(clients))
        model = {n: torch.tensor(rng.standard_normal(a.shape), dtype=a.dtype) for n, a in Net().state_dict().items()}
        if rng.random() < 0.3:
            for own in (ours, theirs):
                own.get_parameters(client_id=client, init_model=False)
        mine, other = (own.aggregate(client, model, round=step) for own in (ours, theirs))
        if step % size == size - 1:
            largest = max(np.abs(flat(each)).max() for each in (mine, other, model)) * 1.5
            allowed += U32 * largest * (2 * alpha * size / clients * (size + 3) + 4)
        difference = np.abs(flat({n: mine[n] for n in names}) - flat({n: other[n] for n in names})).max()
        assert difference <= allowed
        stale |= bool(difference)
    assert ours.server.version == 8
    assert stale
    assert np.abs(flat(Net().state_dict()) - flat(mine)).max() > 1000 * allowed  # the bound says something


def test_what_clients_get_is_theirs():
    """In whatever way they write to it."""
    own = aggregator()
    before, models = params(own), [own.get_parameters(client_id=client) for client in range(4)]
    models.append(own.aggregate(0, moved(models[0], 1.0)))
    other = own.get_parameters(client_id="other")
    for write, model in zip(
        (
            lambda array: array.zero_(),
            lambda array: array.numpy().fill(0),
            lambda array: array.data.mul_(0),
            lambda array: array.view(-1)[1:].zero_(),
            lambda array: torch.from_dlpack(array).zero_(),
        ),
        models,
        strict=True,
    ):
        for array in model.values():
            write(array)
        assert params(own) == before
        assert flat(other).astype(np.float32).tobytes() == before
        assert flat(own.get_parameters()).astype(np.float32).tobytes() == before
        assert flat(model).astype(np.float32).tobytes() != before


def test_batch_norm_other_buffers_and_bfloat16():
    """APPFL's trainers send buffers that a state_dict leaves out, too."""
    net = Net(statistics=True)
    net.brief = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    own = aggregator(net)
    for client in (1, 2):
        model = own.get_parameters(client_id=client)
        assert {name: array.dtype for name, array in model.items()} == {n: a.dtype for n, a in net.state_dict().items()}
        result = own.aggregate(client, {**moved(model, 2.0), "unsaved": torch.ones(3)})
    assert own.counts["joined"] == 2
    for name, array in net.state_dict().items():
        added = 2.0 if array.is_floating_point() else 1
        assert torch.allclose(result[name], array + added, rtol=0, atol=1e-6), name
    net.load_state_dict(result)


def test_facts_are_in_the_reports_of_trainers():
    """Those that the rule needs, or the server lists; the last one of a list, as for metrics."""
    rule = replace(fedbuff(buffer_size=2), weigh=Given("quality")).to_config()
    configs = {"rule": rule, "num_clients": 4, "server_options": {"facts": ["tokens"], "log": True}}
    own = AffluxAggregator(Net(), OmegaConf.create(configs), None)
    for client in (1, 3):
        model = moved(own.get_parameters(client_id=client), 1.0)
        own.aggregate(client, model, quality=[9.0, float(client)], tokens=7, other=1.0, current_local_steps=5)
    joins = {(entry.facts, entry.local_steps) for entry in own.server.log if isinstance(entry, Join)}
    assert joins == {((("quality", quality), ("tokens", 7.0)), 5) for quality in (1.0, 3.0)}
