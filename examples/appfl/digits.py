"""Asynchronous federated learning with APPFL on handwritten digits, in its virtual-time simulator.

    pip install '.[appfl]' appfl scikit-learn
    python examples/appfl/digits.py --rule ca2fl

A second run with the same --store continues where the first one ended or was killed.
"""

import argparse
from pathlib import Path

import torch
from appfl.agent import SimClientAgent, SimServerAgent
from appfl.vsim import AsyncSimDriver, ClientProfile, VsimLogger
from omegaconf import DictConfig, OmegaConf
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

HERE = Path(__file__).parent
CLIENTS, TEST = 10, 297
RULES = {"fedbuff": {"alpha": 1.0}, "ca2fl": {"alpha": 1.0}, "fadas": {"alpha": 0.02}}


def configuration(rule: str, models: int, store: str) -> DictConfig:
    config = OmegaConf.load(HERE / "digits.yaml")
    assert isinstance(config, DictConfig)
    config.here = str(HERE)
    OmegaConf.resolve(config)
    server = config.server_configs
    server.num_global_epochs = models
    server.aggregator_kwargs.update({"rule": rule, **RULES[rule]})
    if store:
        server.aggregator_kwargs.update({"store": store, "checkpoint_every": 2})
    return config


def data(client: int | None) -> TensorDataset:
    """The part of a client, of few classes each; None: the test part."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    if client is None:
        return TensorDataset(x[-TEST:], y[-TEST:])
    chunks = torch.argsort(y[:-TEST], stable=True).chunk(2 * CLIENTS)
    part = torch.cat([chunks[client], chunks[client + CLIENTS]])
    return TensorDataset(x[part], y[part])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, default="fedbuff")
    parser.add_argument("--models", type=int, default=200, help="of this run; five make a step")
    parser.add_argument("--store", default="", help="a folder; a second run with it continues")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # the model is small

    def config() -> DictConfig:
        return configuration(chosen.rule, chosen.models, chosen.store)

    server = SimServerAgent(config())
    server.load_server_val_dataset(data(None))
    clients, profiles = [], {}
    for number in range(CLIENTS):
        parts = data(number), data(None)  # to train with, to validate with
        client = SimClientAgent(config().client_configs, client_id=f"client-{number}", client_dataset=parts)
        profiles[client.get_id()] = ClientProfile(compute_factor=1.0 + number)  # the last one is ten times slower
        server.set_sample_size(client.get_id(), client.get_sample_size())
        clients.append(client)
    aggregator = server.aggregator
    before = aggregator.server.version
    driver = AsyncSimDriver(server, clients, profiles, 6, VsimLogger(), base_step_time=0.01, eval_every=50)
    driver.run()
    aggregator.close()
    print(f"checks: {driver.verify(chosen.models)}")
    print(f"counts: { ({name: count for name, count in aggregator.counts.items() if count}) }")
    server.model.load_state_dict(server.get_parameters(serial_run=True, init_model=False))
    _, accuracy = server.server_validate()
    last = aggregator.server.version
    print(f"{chosen.rule}: accuracy {100 * accuracy:.1f} % after steps {before + 1} to {last}")


if __name__ == "__main__":
    main()
