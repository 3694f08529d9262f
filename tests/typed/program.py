"""A program of a user, type-checked by `make release-check` with mypy --strict and basedpyright against the wheel."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from afflux import AffluxError, Arrivals, Receipt, Report, Rule, Server, ServerOptions, codecs, ops, plan, replay, rules
from afflux import store as stores


def train(params: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.full_like(params, 0.5)


def serve(rule: Rule, clients: Sequence[int], folder: Path | None) -> Server:
    reports: list[Report] = []
    options = ServerOptions(num_clients=100, log=True)
    server = Server(rule, np.zeros(4, np.float32), options, store=folder, num_threads=1, on_step=reports.append)
    for client in clients:
        task = server.checkout(client)
        try:
            receipt: Receipt = server.push(task=task, update=train(task.params), num_examples=3)
        except AffluxError as error:
            print(client, error)
            continue
        if receipt.report is not None:
            print(receipt.report.version, receipt.report.weights)
    return server


def mean_age(arrivals: Arrivals) -> float:
    return float(np.mean(arrivals.staleness))


def main() -> None:
    rule = rules.ca2fl(buffer_size=2, codec=codecs.affine(4))
    print(plan(rule, 4, num_clients=100).memory_bytes)
    server = serve(rule, [1, 2, 3], None)
    again = replay(server.log, serve(rule, [], None), lambda join: train(server.params))
    print(np.array_equal(again.params, server.params))
    vectors = [np.ones(3, np.float32), np.zeros(3, np.float32)]
    products: npt.NDArray[np.float64] = ops.gram(vectors)
    out = np.zeros(3, np.float32)
    ops.apply(ops.Pass(vectors[0], out, ops.Combine(vectors, np.array([0.5, 0.5])), step=ops.Step("sgd")))
    print(products, out, stores.info)


if __name__ == "__main__":
    main()
