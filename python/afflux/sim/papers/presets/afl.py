"""Anarchic FL (Yang, Zhang, Khanduri and Liu, ICML 2022): Table 2, its asynchronous runs with constant steps."""

from collections.abc import Iterator

from afflux.sim.papers.presets.preset import DECIDED, Preset, Sourced, task_of

PAPER = "Anarchic FL, ICML 2022"
APPENDIX = "appendix E.1"
STEP = f"{APPENDIX}: eta eta_L, the step of the proofs; with the printed eta the table is not met"


def presets() -> Iterator[Preset]:
    """Yield a preset for each model and number of workers; images have one class a worker."""
    for cohort, clients in ((5, 10), (20, 100)):
        settings = {
            "data": Sourced("mnist", "Table 2"),
            "model": Sourced("logreg", "Table 2"),
            **_workers(clients, Sourced(0.1, f"{APPENDIX}: eta_L"), 5, 64),
            "arrivals": Sourced(150 * cohort, f"{APPENDIX}: 150 rounds"),
            "eval_every": Sourced(10 * cohort, f"{DECIDED}: every tenth round"),
        }
        yield _preset(
            f"afl-logreg-{cohort}of{clients}",
            f"logistic regression on mnist, {cohort} of {clients} workers, 1 class a worker",
            "mnist",
            "logreg",
            settings,
            cohort,
            Sourced(0.1, STEP),
            "The whole table, beside the paper's numbers: afflux reproduce afl-table2.",
        )
    yield _preset(
        "afl-cnn-5of10",
        "CNN on cifar10, 5 of 10 workers, 1 class a worker",
        "cifar10",
        "afl-cnn",
        {
            "task": Sourced(task_of("cifar10", "afl-cnn"), "Tables 1 and 2"),
            **_workers(10, Sourced(0.1, f"{APPENDIX}: eta_L"), 5, 500),
            "rounds": Sourced(10_000, APPENDIX),
            "eval_every": Sourced(100 * 5, f"{DECIDED}: every hundredth round"),
        },
        5,
        Sourced(0.1, STEP),
        "Other cells of Table 2: --classes 5; --steps-law uniform, dynamic steps; --stale-models 1, synchrony.",
    )
    yield _preset(
        "afl-lstm",
        "LSTM on shakespeare, 72 workers a round, a role each",
        "shakespeare",
        "char-lstm",
        {
            "task": Sourced(task_of("shakespeare", "char-lstm"), APPENDIX),
            **_workers(None, Sourced(0.8, f"{APPENDIX}: eta_L"), 50, 10),
            "rounds": Sourced(300, APPENDIX),
            "eval_every": Sourced(10 * 72, f"{DECIDED}: every tenth round"),
        },
        72,
        Sourced(40.0, f"{APPENDIX}: eta eta_L = 50 x 0.8, the step of the proofs"),
        "The paper has 143 workers, LEAF's roles. Here each role of the files is a worker, however many there are.",
    )


def _workers(clients: int | None, client_lr: Sourced, local_steps: int, batch_size: int) -> dict[str, Sourced]:
    """Return the settings of the clients; with a number of clients their data are divided by classes."""
    divided = {
        "num_clients": Sourced(clients, "Table 2: M"),
        "partition": Sourced("classes", APPENDIX),
        "classes": Sourced(1, "Table 2: p"),
    }
    return {
        **(divided if clients else {}),
        "protocol": Sourced("rounds", f"{APPENDIX}: m workers in a round, each on one of the last models"),
        "stale_models": Sourced(5, APPENDIX),
        "steps_law": Sourced("constant", "Table 2"),
        "client_lr": client_lr,
        "local_steps": Sourced(local_steps, "Table 2"),
        "batch_size": Sourced(batch_size, APPENDIX),
        "delays": Sourced("exponential", f"{DECIDED}: they change nothing in rounds but the times"),
    }


def _preset(
    name: str,
    about: str,
    data: str,
    model: str,
    settings: dict[str, Sourced],
    cohort: int,
    server_lr: Sourced,
    note: str,
) -> Preset:
    rule, workers = Sourced("afa_cd", "Algorithm 2"), Sourced(cohort, "Table 2: m")
    return Preset(name, PAPER, about, data, model, rule, settings, workers, server_lr, note)
