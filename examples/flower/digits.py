"""Asynchronous federated learning with Flower on handwritten digits.

    pip install '.[flower]' 'flwr[simulation]' scikit-learn torch
    python examples/flower/digits.py --rule ca2fl          # in the simulation engine
    flwr run examples/flower --run-config "rule='ca2fl'"    # where Flower's configuration says

The ClientApp is that of a synchronous run; the ServerApp has another strategy.
"""

import argparse
import os

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits

from afflux import rules
from afflux.integrations.flower import AsyncStrategy

NODES, TEST = 10, 297
RULES = {
    "fedbuff": rules.fedbuff(buffer_size=3),
    "ca2fl": rules.ca2fl(buffer_size=3),
    "fadas": rules.fadas(buffer_size=3, server_lr=0.02),
}
client_app = ClientApp()
server_app = ServerApp()
settings = {"rule": "fedbuff", "steps": 40, "store": ""}
torch.set_num_threads(1)  # of a small model; other clients train at the same time


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def data(part: int | None, parts: int = NODES) -> tuple[torch.Tensor, torch.Tensor]:
    """One part of the training data, of few classes; None: the test data."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    if part is None:
        return x[-TEST:], y[-TEST:]
    chunks = torch.argsort(y[:-TEST], stable=True).chunk(2 * parts)
    own = torch.cat([chunks[part], chunks[part + parts]])
    return x[own], y[own]


def loaded(message: Message) -> torch.nn.Module:
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@client_app.train()
def train(message: Message, context: Context) -> Message:
    part, parts = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    model, (x, y) = loaded(message), data(part, parts)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor(0.0)
    for batch in torch.cat([torch.randperm(len(x)) for _ in range(5)]).split(16):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x), "train_loss": loss.item()})
    who = ConfigRecord({"partition-id": part})  # the node's id is another one in the next run
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics, "who": who})
    return Message(content, reply_to=message)


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
        concurrency=3,
        client_key="partition-id",
        store=chosen["store"] or None,
        checkpoint_every=1,  # a small model
        evaluate_every=10,
        min_available_nodes=3,
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
    parser.add_argument("--store", type=os.path.abspath, help="a folder; a second run with it continues")
    settings = vars(parser.parse_args())
    from flwr.simulation import run_simulation  # imports Ray, which a node does not need

    one_cpu = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=NODES, backend_config=one_cpu)
