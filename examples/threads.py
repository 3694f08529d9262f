"""A torch training loop with threads: eight clients train at once and push into one server.

python examples/threads.py

Each thread checks out the newest version, trains its own model and pushes it. No lock is needed: a push waits only for
the step that it completes.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from sklearn.datasets import load_digits

from afflux import Server
from afflux.rules import fedbuff

CLIENTS, AT_ONCE, TASKS, STEPS, CLIENT_LR = 20, 8, 400, 10, 0.1


def new_model() -> torch.nn.Module:
    """A small network with BatchNorm, whose running statistics the server averages."""
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Some steps of SGD; returns the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=CLIENT_LR)
    model.train()
    for batch in torch.randperm(len(x)).repeat(STEPS).split(32)[:STEPS]:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train, and print the accuracy and the staleness of the arrivals."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(y))
    test, parts = order[:400], order[400:].chunk(CLIENTS)

    staleness: list[float] = []
    server = Server(
        fedbuff(buffer_size=5), new_model(), on_step=lambda report: staleness.append(report.metrics()["staleness_mean"])
    )

    def one_task(number: int) -> None:
        client = number % CLIENTS
        task, model = server.checkout(client, lease=60), new_model()
        task.load(model)
        loss = train(model, x[parts[client]], y[parts[client]])
        server.push(task=task, model=model, num_examples=len(parts[client]), loss=loss)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(one_task, range(TASKS)))  # list: raises what a thread has raised

    final = new_model().eval()
    server.pull(out=final)
    accuracy = (final(x[test]).argmax(1) == y[test]).float().mean().item()
    mean = sum(staleness) / len(staleness)
    print(f"{server.version} versions, accuracy {accuracy:.3f}, mean staleness {mean:.1f}")


if __name__ == "__main__":
    main()
