"""Client updates a second of whole simulations: the clients' training, the server, and the events between them."""

from collections.abc import Callable

from bench.rows.fedbuff import FEDBUFF
from bench.rows.simulators.autograd import autograd_alone
from bench.rows.simulators.flgo import FLGO_MODULES, flgo
from bench.rows.simulators.ours import no_compiler, ours, ours_compiled
from bench.rows.simulators.pfl import PFL_MODULES, pfl
from bench.rows.simulators.workload import (
    BATCH,
    BUFFER,
    CONCURRENCY,
    STEPS,
    MakeModel,
    Run,
    Simulator,
    Workload,
    one_update,
    one_update_in_float64,
)
from bench.spec.columns import ERROR, ROLE, UPDATE, Line, number
from bench.spec.contender import TORCH, Arrays, Contender, Round, extra, peer
from bench.spec.inputs import Case, Inputs
from bench.spec.row import Asked, Exact, Row

QUICK_UPDATES = CONCURRENCY + BUFFER
#: The batches that a loader of FLGo makes, what the loader is, and its name in `flgo_task`.
FLGO_LOADERS = (
    ("batches by index", "a DataLoader of one's own", "BatchesByIndex"),
    ("torch's loader", "torch's DataLoader", "torch_loader"),
)


def rounds_of(simulator: Simulator, make_model: MakeModel, *, trains: bool = True) -> Callable[[Inputs], Round]:
    """Return a contender.

    Its error is the error of one update, because simulators order the batches of a run differently.
    """

    def make(inputs: Inputs) -> Round:
        new_run = simulator(Workload(make_model, inputs.m))
        ready: list[Run] = [new_run()]

        def prepare(k: int) -> None:
            ready[:] = [new_run()]

        def after(params: object) -> Arrays:
            return {"params": simulator(one_update(make_model))()()} if trains else {}

        return Round(lambda k: ready.pop()(), lambda k: {}, after, prepare)

    return make


def contenders(make_model: MakeModel) -> list[Contender]:
    return [
        Contender(
            "afflux",
            "Simulation(model, clients, sgd(...), rules='fedbuff').run()",
            rounds_of(ours, make_model),
            role="ours",
            modules=TORCH,
        ),
        Contender(
            "afflux, compiled",
            "Simulation(model, clients, sgd(...), rules='fedbuff', compile=True).run()",
            rounds_of(ours_compiled, make_model),
            caveat="the C++ compiler, 8 to 40 s in each process, is not timed",
            role="ours",
            modules=TORCH,
            requirement=no_compiler,
        ),
        *(
            peer(
                f"flgo, {batches}",
                f"flgo.init(task, fedbuff, Simulator=...).run(), with {loader}",
                rounds_of(flgo(name), make_model),
                caveat="its setup is not timed",
                modules=FLGO_MODULES,
            )
            for batches, loader, name in FLGO_LOADERS
        ),
        peer(
            "pfl",
            "FederatedAveraging().run(SimulatedBackend(...)): synchronous, batches that are cut once",
            rounds_of(pfl, make_model),
            caveat="synchronous; does not shuffle; its setup is not timed",
            modules=PFL_MODULES,
        ),
        extra(
            "autograd alone",
            "loss.backward() over ready batches, M * steps times: what all of them contain",
            rounds_of(autograd_alone, make_model, trains=False),
            traffic=FEDBUFF.traffic,
        ),
    ]


def an_update(lines: list[Line]) -> None:
    ours = next((line["median"] for line in lines if line["name"] == "afflux"), None)
    for line in lines:
        line["updates"] = line["m"] / line["median"]
        line["times"] = line["median"] / ours if ours else None


def simulator_row(name: str, make_model: MakeModel, d: int, updates: int) -> Row:
    """Return the row of a model with d params, and this number of client updates per run."""

    def cases(asked: Asked) -> list[Case]:
        import typer  # not installed where only the rows of a GPU run

        m = asked.m or (QUICK_UPDATES if asked.quick else updates)
        if asked.d is not None:
            raise typer.BadParameter("the model decides in the rows of simulators", param_hint="-d")
        if m < QUICK_UPDATES or m % CONCURRENCY:
            why = f"in the rows of simulators a multiple of {CONCURRENCY}, at least {QUICK_UPDATES}"
            raise typer.BadParameter(why, param_hint="-M")
        # All train with one torch thread, as afflux always does.
        return [Case(d, m, 1, sets=asked.sets)]

    def reference(before: Arrays) -> Exact:
        return {"params": one_update_in_float64(make_model)}

    return Row(
        name=f"simulators-{name}",
        formula=f"M client updates of {STEPS} steps of SGD with batches of {BATCH}, {CONCURRENCY} clients at a time, "
        f"a server step for each {BUFFER}",
        counted="4 d (M + 2), as fedbuff; not what the trainings move",
        traffic=FEDBUFF.traffic,
        reference=reference,
        cases=cases,
        contenders=contenders(make_model),
        columns=(
            ROLE,
            *UPDATE,
            number("updates a second", "updates", ".0f"),
            number("x afflux's time", "times", ".2f"),
            ERROR,
        ),
        compare=an_update,
    )
