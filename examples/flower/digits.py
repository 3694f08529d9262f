"""Asynchronous federated learning with Flower on handwritten digits.

    pip install 'afflux[flower]' 'flwr[simulation]' scikit-learn torch
    python examples/flower/digits.py --rule ca2fl          # in the simulation engine
    flwr run examples/flower --run-config "rule='ca2fl'"    # where Flower's configuration says

The ClientApp is that of a synchronous run; the ServerApp has another strategy.
"""

import argparse

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits

from afflux import rules
from afflux.integrations.flower import AsyncStrategy

NODES, TEST = 10, 297
RULES = {
    "fedbuff": rules.fedbuff(buffer_size=5),
    "ca2fl": rules.ca2fl(buffer_size=5),
    "fadas": rules.fadas(buffer_size=5, server_lr=0.02),
}
client_app = ClientApp()
server_app = ServerApp()
settings = {"rule": "fedbuff", "steps": 40, "store": ""}


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def data(node: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a node, of few classes each; None: the test part."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    if node is None:
        return x[-TEST:], y[-TEST:]
    chunks = torch.argsort(y[:-TEST], stable=True).chunk(2 * NODES)
    part = torch.cat([chunks[node], chunks[node + NODES]])
    return x[part], y[part]


def loaded(message: Message) -> torch.nn.Module:
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@client_app.train()
def train(message: Message, context: Context) -> Message:
    model, (x, y) = loaded(message), data(int(context.node_config["partition-id"]))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor(0.0)
    for batch in torch.cat([torch.randperm(len(x)) for _ in range(5)]).split(16):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x), "train_loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def accuracy(step: int, arrays: ArrayRecord) -> MetricRecord:
    model, (x, y) = new_model(), data(None)
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": (model(x).argmax(1) == y).float().mean().item()})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    chosen = {**settings, **context.run_config}
    rule, steps = chosen["rule"], chosen["steps"]
    strategy = AsyncStrategy(
        RULES[rule],
        concurrency=6,
        store=chosen["store"] or None,
        evaluate_every=10,
        min_available_nodes=4,
        fraction_evaluate=0.0,
    )
    initial = ArrayRecord(new_model().state_dict())
    result = strategy.start(grid, initial, num_rounds=steps, evaluate_fn=accuracy)
    last = result.evaluate_metrics_serverapp[steps]["accuracy"]
    print(f"{rule}: accuracy {100 * last:.1f} % after {steps} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, default=settings["rule"])
    parser.add_argument("--steps", type=int, default=settings["steps"])
    parser.add_argument("--store", default="", help="a folder; a second run with it goes on")
    settings = vars(parser.parse_args())
    run_simulation(server_app, client_app, num_supernodes=NODES)
