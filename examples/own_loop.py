"""Your own federated loop: the rule is a command-line argument, and no other line depends on it.

python examples/own_loop.py fedbuff --option buffer_size=5
python examples/own_loop.py fedasync
python examples/own_loop.py ca2fl --option buffer_size=5
python examples/own_loop.py wkafl --option buffer_size=5 --option server_lr=0.5

Twenty clients, eight of them training at once, learn a softmax regression on scikit-learn's digits. Each client checks
a version out, trains its own model, and pushes it; the server converts it to the kind of the rule.
"""

import argparse
from ast import literal_eval

import numpy as np
from sklearn.datasets import load_digits

from afflux import Server, rules

CLIENTS, AT_ONCE, ARRIVALS, STEPS, CLIENT_LR = 20, 8, 1500, 5, 0.5


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rule", nargs="?", default="fedbuff", help="a name of afflux.rules (default: fedbuff)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the rule")
    return parser.parse_args()


def number_or_text(value: str) -> object:
    """The value of an option."""
    try:
        return literal_eval(value)
    except (SyntaxError, ValueError):
        return value


def loss_and_gradient(model: dict, x: np.ndarray, y: np.ndarray) -> tuple[float, dict]:
    """Loss and gradient of a softmax regression on a batch."""
    logits = x @ model["weight"] + model["bias"]
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    loss = float(-np.log(chances[np.arange(len(y)), y] + 1e-12).mean())
    chances[np.arange(len(y)), y] -= 1
    return loss, {"weight": x.T @ chances / len(y), "bias": chances.mean(axis=0)}


def main() -> None:
    arguments, rng = parsed(), np.random.default_rng(0)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    test, train = np.split(rng.permutation(len(y)), [400])
    shards = np.array_split(train[np.argsort(y[train], kind="stable")], CLIENTS)  # each client has few of the digits

    options = {name: number_or_text(value) for name, _, value in (each.partition("=") for each in arguments.option)}
    rule = rules.make(arguments.rule, **options)
    first = {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
    server = Server(rule, first, num_clients=CLIENTS)

    training = [server.checkout(client) for client in range(AT_ONCE)]
    for _ in range(ARRIVALS):
        task = training.pop(int(rng.integers(AT_ONCE)))  # the client that finishes next
        shard, model = shards[task.client], task.tree()
        for _ in range(STEPS):
            batch = rng.choice(shard, 16)
            loss, gradient = loss_and_gradient(model, x[batch], y[batch])
            for name, array in model.items():
                array -= CLIENT_LR * gradient[name].astype(np.float32)
        server.push(task=task, model=model, num_examples=len(shard), loss=loss, client_lr=CLIENT_LR, local_steps=STEPS)
        busy = {other.client for other in training}
        training.append(server.checkout(int(rng.choice([c for c in range(CLIENTS) if c not in busy]))))

    final = server.layout.views(server.params)
    right = (x[test] @ final["weight"] + final["bias"]).argmax(axis=1) == y[test]
    print(f"{rule.name}: {server.version} versions, accuracy {right.mean():.3f}")


if __name__ == "__main__":
    main()
