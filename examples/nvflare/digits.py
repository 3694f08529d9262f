"""Asynchronous federated learning with NVIDIA FLARE's Collab API on handwritten digits.

    pip install '.[nvflare]' scikit-learn torch
    python examples/nvflare/digits.py --rule ca2fl

The sites are processes of NVFlare's simulator; of a deployed job only the last lines change.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from nvflare.collab import CollabRecipe, collab
from nvflare.recipe import SimEnv
from sklearn.datasets import load_digits

from afflux.integrations.nvflare import AsyncServer

TEST = 297
RULES = {
    "fedbuff": {"num_updates_for_model": 3, "global_lr": 1.0, "staleness_weight": False, "max_model_history": 20},
    "ca2fl": {"buffer_size": 3},
    "fadas": {"buffer_size": 3, "server_lr": 0.02},
}


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def data(site: int | None, sites: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a site, of few classes each; None: the test part."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    if site is None:
        return x[-TEST:], y[-TEST:]
    chunks = torch.argsort(y[:-TEST], stable=True).chunk(2 * sites)
    part = torch.cat([chunks[site], chunks[site + sites]])
    return x[part], y[part]


class Digits(AsyncServer):
    """The server object: it is made again in the server's process, of the arguments in the job's configuration."""

    def initial_model(self) -> dict[str, torch.Tensor]:
        """Version 0."""
        return new_model().state_dict()

    def evaluate(self, version: int, model: dict[str, torch.Tensor]) -> dict[str, float]:
        """On the test part, on the server."""
        own, (x, y) = new_model(), data(None, 1)
        own.load_state_dict(model)
        return {"accuracy": (own(x).argmax(1) == y).float().mean().item()}


class Trainer:
    """The client object, one in each site's process."""

    def __init__(self, sites: int) -> None:
        self.sites = sites

    @collab.publish
    def train(self, model: dict[str, torch.Tensor], version: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Two epochs on the site's own part; returns the model and metrics."""
        torch.set_num_threads(1)
        own, (x, y) = new_model(), data(int(collab.site_name.split("-")[1]) - 1, self.sites)
        own.load_state_dict(model)
        optimizer, loss, steps = torch.optim.SGD(own.parameters(), lr=0.1), torch.tensor(0.0), 0
        for batch in torch.cat([torch.randperm(len(x)) for _ in range(2)]).split(16):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(own(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            steps += 1
        return own.state_dict(), {"num_steps": steps, "train_loss": loss.item()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, default="fedbuff")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--store", default=None, help="a folder; a second run with it continues")
    parser.add_argument("--workspace", default=None, help="a folder for NVFlare's files")
    given = parser.parse_args()
    settings = {"concurrency": 3, "timeout": 60, "evaluate_every": 10, "checkpoint_every": 5}
    if given.store is not None:
        settings["store"] = str(Path(given.store).resolve())
    server = Digits(given.rule, RULES[given.rule], given.rounds, settings=settings)
    recipe = CollabRecipe("digits", server=server, client=Trainer(given.sites), min_clients=given.sites)
    workspace = given.workspace or tempfile.mkdtemp()
    recipe.execute(SimEnv(num_clients=given.sites, workspace_root=workspace))
