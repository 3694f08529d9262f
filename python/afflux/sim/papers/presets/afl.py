"""Anarchic FL (Yang, Zhang, Khanduri and Liu, ICML 2022): Table 2."""

from collections.abc import Iterator

from afflux.sim.papers.presets.preset import DECIDED, Preset, Sourced

PAPER = "Anarchic FL, ICML 2022"
APPENDIX = "appendix E.1"


def presets() -> Iterator[Preset]:
    """Yield a preset for each number of workers: asynchronous, constant steps, one class a worker."""
    for cohort, clients in ((5, 10), (20, 100)):
        settings = {
            "data": Sourced("mnist", "Table 2"),
            "model": Sourced("logreg", "Table 2"),
            "num_clients": Sourced(clients, "Table 2: M"),
            "protocol": Sourced("rounds", f"{APPENDIX}: m workers in a round, each on one of the last models"),
            "stale_models": Sourced(5, APPENDIX),
            "steps_law": Sourced("constant", "Table 2"),
            "partition": Sourced("classes", APPENDIX),
            "classes": Sourced(1, "Table 2: p"),
            "client_lr": Sourced(0.1, f"{APPENDIX}: eta_L"),
            "local_steps": Sourced(5, "Table 2"),
            "batch_size": Sourced(64, APPENDIX),
            "delays": Sourced("exponential", f"{DECIDED}: they change nothing in rounds but the times"),
            "arrivals": Sourced(150 * cohort, f"{APPENDIX}: 150 rounds"),
            "eval_every": Sourced(10 * cohort, f"{DECIDED}: every tenth round"),
        }
        yield Preset(
            f"afl-logreg-{cohort}of{clients}",
            PAPER,
            f"logistic regression on mnist, {cohort} of {clients} workers, 1 class a worker",
            "mnist",
            "logreg",
            Sourced("afa_cd", "Algorithm 2"),
            settings,
            Sourced(cohort, "Table 2: m"),
            Sourced(0.1, f"{APPENDIX}: eta eta_L, the step of the proofs; with the printed eta the table is not met"),
            "The whole table, beside the paper's numbers: afflux reproduce afl-table2.",
        )
