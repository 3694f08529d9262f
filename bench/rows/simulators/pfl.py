"""pfl-research's simulation of a workload: FedAvg over its simulated backend, in synchronous rounds."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from bench.rows.simulators.workload import EXAMPLES, RATE, STEPS, Run, Workload, data_of, flat, loss_of, seeded
from bench.spec.libraries import find
from bench.spec.optional_torch import torch

PFL_MODULES = (
    *("torch", "pfl.model.pytorch", "pfl.aggregate.simulate", "pfl.algorithm.federated_averaging"),
    *("pfl.data.federated_dataset", "pfl.data.pytorch", "pfl.hyperparam", "pfl.metrics"),
)


def as_pfl_module(module: Any) -> Any:
    """Return the module with the methods that pfl calls; pfl's evaluation in the first round gets an empty metric."""

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def loss(self, x: Any, y: Any) -> Any:
            return loss_of(self.module, x, y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            return {"none": find("pfl.metrics").Weighted(0.0, 1)}

    return Module()


def pfl(work: Workload) -> Callable[[], Run]:
    """Return pfl's simulation. Its data sets hold fixed batches in the order of the data; pfl does not shuffle."""
    base, hyperparams = find("pfl.algorithm.base"), find("pfl.hyperparam")
    tensors = find("pfl.data.pytorch").PyTorchTensorDataset
    users = [tensors(data_of(client), user_id=str(client)) for client in range(work.clients)]
    order = cycle(np.random.default_rng(0).permutation(work.clients).tolist())
    dataset = find("pfl.data.federated_dataset").FederatedDataset(users.__getitem__, lambda: next(order))
    rounds = work.updates // work.concurrency
    params = base.NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds + 1,
        train_cohort_size=work.concurrency,
        val_cohort_size=None,
    )
    train = hyperparams.NNTrainHyperParams(
        local_learning_rate=RATE, local_num_epochs=STEPS * work.batch_size // EXAMPLES, local_batch_size=work.batch_size
    )

    def new_run() -> Run:
        module = as_pfl_module(seeded(work.make_model))
        central = torch.optim.SGD(module.parameters(), lr=1.0)
        model = find("pfl.model.pytorch").PyTorchModel(module, torch.optim.SGD, central)
        algorithm = find("pfl.algorithm.federated_averaging").FederatedAveraging()
        backend = find("pfl.aggregate.simulate").SimulatedBackend(dataset, None)

        def run() -> np.ndarray:
            algorithm.run(params, backend, model, train, send_metrics_to_platform=False)
            return flat(module)

        return run

    return new_run
