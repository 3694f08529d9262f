"""Anarchic FL (Yang, Zhang, Khanduri and Liu, ICML 2022): Table 2, its asynchronous runs with constant steps."""

from collections.abc import Iterator

from afflux.lab.presets.preset import DECIDED, Preset, Sourced, sourced, task_of

PAPER = "Anarchic FL, ICML 2022"
APPENDIX = "appendix E.1"
WORKERS = "Table 2: m"
STEP = f"{APPENDIX}: eta eta_L, the step of the proofs; with the printed eta the table is not met"


def presets() -> Iterator[Preset]:
    """Yield a preset for each model and number of workers; images have one class a worker."""
    rule = Sourced("afa_cd", "Algorithm 2")
    for cohort, clients in ((5, 10), (20, 100)):
        name = f"afl-logreg-{cohort}of{clients}"
        about = f"logistic regression on mnist, {cohort} of {clients} workers, 1 class a worker"
        settings = sourced("Table 2", data="mnist", model="logreg") | _workers(clients, 0.1, 5, 64)
        settings |= sourced(f"{APPENDIX}: 150 rounds", arrivals=150 * cohort) | _evaluated("tenth", 10 * cohort)
        note = "The whole table, with the paper's numbers: python -m bench.papers run afl-table2."
        facts = rule, settings, Sourced(cohort, WORKERS), Sourced(0.1, STEP), note
        yield Preset(name, PAPER, about, "mnist", "logreg", *facts)
    settings = sourced("Tables 1 and 2", task=task_of("cifar10", "afl-cnn")) | _workers(10, 0.1, 5, 500)
    settings |= sourced(APPENDIX, rounds=10_000) | _evaluated("hundredth", 100 * 5)
    about = "CNN on cifar10, 5 of 10 workers, 1 class a worker"
    note = "Other cells of Table 2: --classes 5; --steps-law uniform, dynamic steps; --stale-models 1, synchrony."
    facts = rule, settings, Sourced(5, WORKERS), Sourced(0.1, STEP), note
    yield Preset("afl-cnn-5of10", PAPER, about, "cifar10", "afl-cnn", *facts)
    settings = sourced(APPENDIX, task=task_of("shakespeare", "char-lstm")) | _workers(None, 0.8, 50, 10)
    settings |= sourced(APPENDIX, rounds=300) | _evaluated("tenth", 10 * 72)
    about = "LSTM on shakespeare, 72 workers a round, a role each"
    note = "The paper has 143 workers, LEAF's roles. Here each role of the files is a worker, however many there are."
    server_lr = Sourced(40.0, f"{APPENDIX}: eta eta_L = 50 x 0.8, the step of the proofs")
    facts = rule, settings, Sourced(72, WORKERS), server_lr, note
    yield Preset("afl-lstm", PAPER, about, "shakespeare", "char-lstm", *facts)


def _workers(clients: int | None, client_lr: float, local_steps: int, batch_size: int) -> dict[str, Sourced]:
    """Return the settings of the clients; with a number of clients their data are divided by classes."""
    divided = {
        **sourced("Table 2: M", num_clients=clients),
        **sourced(APPENDIX, partition="classes"),
        **sourced("Table 2: p", classes=1),
    }
    return {
        **(divided if clients else {}),
        **sourced(f"{APPENDIX}: m workers in a round, each on one of the last models", protocol="rounds"),
        **sourced(APPENDIX, stale_models=5),
        **sourced("Table 2", steps_law="constant"),
        **sourced(f"{APPENDIX}: eta_L", client_lr=client_lr),
        **sourced("Table 2", local_steps=local_steps),
        **sourced(APPENDIX, batch_size=batch_size),
        **sourced(f"{DECIDED}: they change nothing in rounds but the times", delays="exponential"),
    }


def _evaluated(rounds: str, arrivals: int) -> dict[str, Sourced]:
    return sourced(f"{DECIDED}: every {rounds} round", eval_every=arrivals)
