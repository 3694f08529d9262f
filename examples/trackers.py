"""Runs of a simulation in TensorBoard, Weights & Biases or MLflow, by the function `on_evaluation`.

    python examples/trackers.py tensorboard     # or wandb, mlflow; needs the package of that name, and afflux[lab]

WANDB_MODE=offline keeps the runs of W&B in files. MLflow keeps its runs where MLFLOW_TRACKING_URI says.
"""

import sys
from contextlib import contextmanager

from afflux.lab import Simulation


@contextmanager
def tensorboard_runs(folder):
    """Yield an `on_evaluation` that writes event files; a resumed run supersedes what came after its checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    writers = {}

    def log(run, metrics):
        if run.name not in writers:
            writers[run.name] = SummaryWriter(f"{folder}/{run.name}", purge_step=run.resumed_after + 1)
        for name, value in metrics.items():
            writers[run.name].add_scalar(name, value, metrics["arrivals"])
        writers[run.name].flush()

    yield log


@contextmanager
def wandb_runs(project):
    """Yield an `on_evaluation` that logs to W&B, with a run there for each run here."""
    import wandb

    runs = {}

    def log(run, metrics):
        if run.name not in runs:
            config = {"rule": run.rule, "seed": run.seed, **run.settings, **run.options}
            runs[run.name] = wandb.init(project=project, name=run.name, config=config, reinit="create_new")
        runs[run.name].log(metrics, step=metrics["arrivals"])

    yield log
    for run in runs.values():
        run.finish()


@contextmanager
def mlflow_runs(experiment):
    """Yield an `on_evaluation` that logs to MLflow, with a run there for each run here."""
    from mlflow import MlflowClient, set_experiment

    client, place, runs = MlflowClient(), set_experiment(experiment).experiment_id, {}

    def log(run, metrics):
        if run.name not in runs:
            runs[run.name] = client.create_run(place, run_name=run.name).info.run_id
            for name, value in {"rule": run.rule, "seed": run.seed, **run.settings, **run.options}.items():
                client.log_param(runs[run.name], name, value)
        for name, value in metrics.items():
            client.log_metric(runs[run.name], name, value, step=metrics["arrivals"])

    yield log
    for run_id in runs.values():
        client.set_terminated(run_id)


def main(tracker):
    """Compare two rules on digits."""
    settings = {"model": "logreg", "num_clients": 20, "concurrency": 5, "arrivals": 60, "eval_every": 20}
    simulation = Simulation.of("images", ["fedbuff:buffer_size=5", "fedasync"], seeds=[0, 1], **settings)
    with {"tensorboard": tensorboard_runs, "wandb": wandb_runs, "mlflow": mlflow_runs}[tracker]("afflux") as log:
        results = simulation.run(on_evaluation=log)
    for run in results:
        print(f"{run.spec.label}, seed {run.seed}: {run.final_accuracy:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
