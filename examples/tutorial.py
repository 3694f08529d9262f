"""Your own federated loop, and a server that survives kill -9. docs/start/tutorial.md goes through it.

python examples/tutorial.py fedbuff
python examples/tutorial.py ca2fl --store run/store        # after any end, repeat the command: it continues
python examples/tutorial.py fedbuff --server-lr 0.05 1 20
"""

import argparse
import heapq
import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from tutorial_rule import fresh_first

from afflux import Server
from afflux.rules import ca2fl, fedbuff

CLIENTS, AT_ONCE, ARRIVALS = 20, 8, 600
RULES = {"fedbuff": fedbuff, "ca2fl": ca2fl, "fresh_first": fresh_first}

random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
pixels, digits = load_digits(return_X_y=True)
order = torch.randperm(len(digits))
x, y = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(digits)[order]
validation, training = slice(0, 400), 400 + torch.argsort(y[400:])
shards = training.chunk(CLIENTS)  # sorted by digit: each client has one or two of the ten


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model: nn.Module, client: int) -> None:  # five steps of SGD on the client's own data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(5):
        batch = shards[client][torch.randint(len(shards[client]), (16,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def run(server: Server) -> None:
    """Train until ARRIVALS updates have arrived; print the accuracy after each fifth of them."""
    clock, events = 0.0, []  # (time of the end, client, task) of each client that trains
    for task in server.tasks:  # after a restart: tasks of clients that ended with the old process
        task.cancel()
    while server.joins < ARRIVALS:
        while len(events) < AT_ONCE:
            client = random.choice([c for c in range(CLIENTS) if c not in {busy for _, busy, _ in events}])
            delay = random.expovariate(1 / (1 + client))  # client 19 is 20 times as slow as client 0
            heapq.heappush(events, (clock + delay, client, server.checkout(client)))
        clock, client, task = heapq.heappop(events)  # the client that finishes next
        model = new_model()
        task.load(model)
        train(model, client)
        server.push(task=task, model=model, num_examples=len(shards[client]), client_lr=0.2, local_steps=5)
        if server.joins % (ARRIVALS // 5) == 0:
            server.pull(out=model)
            right = (model(x[validation]).argmax(1) == y[validation]).float().mean()
            print(f"  {server.joins} arrivals, version {server.version}, accuracy {right:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("--server-lr", type=float, nargs="+", default=[1.0])
    parser.add_argument("--store", help="a folder; without it the server is in memory only")
    arguments = parser.parse_args()
    for lr in arguments.server_lr:
        rule, model = RULES[arguments.rule](buffer_size=5, server_lr=lr), new_model()
        if arguments.store:
            server = Server.open_or_create(arguments.store, rule, model, num_clients=CLIENTS)
        else:
            server = Server(rule, model, num_clients=CLIENTS)
        print(f"{arguments.rule}, server_lr {lr}: version {server.version}, {server.joins} arrivals", flush=True)
        run(server)
