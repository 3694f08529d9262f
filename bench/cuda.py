"""The rows on a GPU: the CPU rows' formulas and contenders, with arrays on the GPU, timed by CUDA events.

Contenders are also CuPy, CUDA graphs, and torch's copies, sums and products from device to device. The time of a call
between two events includes the host's; the time of its kernels alone comes from torch's profiler.

python -m bench.cuda [-h] [--out FOLDER] [--rows ROW ...] [--repeats N] [d ...]

It imports neither typer nor rich, which a bare machine may lack.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from afflux import ops
from afflux.arrays.interop import on_host
from bench.measure import library_probes, machine
from bench.measure.library_probes import COPIED, PROBES
from bench.measure.timing import Timed, entrant, measure_groups
from bench.output import report, tables
from bench.rows import cupy_contenders
from bench.rows.ca2fl import CA2FL
from bench.rows.fadas import FADAS
from bench.rows.fedbuff import FEDBUFF
from bench.rows.gram import GRAM
from bench.rows.ingest import INGEST
from bench.rows.mf_ca2fl import MF_CA2FL
from bench.rows.wkafl import WKAFL
from bench.spec import inputs
from bench.spec.arrays import Gpu
from bench.spec.contender import Contender, Round
from bench.spec.inputs import Case, Inputs
from bench.spec.optional_torch import torch
from bench.spec.row import Row, planned

D, SMALL, M = 100_000_000, 10_000, 10
REPEATS = 20
#: The size at which errors are computed and bits are compared; the float64 references are computed on the host.
CHECKED = 300_007

ROWS = {row.name: row for row in (INGEST, GRAM, FEDBUFF, FADAS, CA2FL, *MF_CA2FL, WKAFL)}
#: For each row, the contender that is also timed as a CUDA graph, because it never waits for the host.
GRAPHED = {
    "fedbuff": "torch addmv_",
    "fadas": "torch mv, addcdiv_",
    "ca2fl": "torch mv, addmv_",
    "mf-ca2fl-affine-4": "torch, client by client",
}


def why_not() -> str:
    """Return the reason why nothing can be measured; empty if there is none."""
    if torch is None:
        return "torch is not installed"
    (reason,) = [backend.why_not for backend in ops.backends() if backend.name == "cuda"]
    return reason or ("" if torch.cuda.is_available() else "torch finds no GPU")


def here() -> Gpu:
    return Gpu(lambda values: torch.tensor(values, device="cuda"))


def events() -> Callable[[], float]:
    """Start a timer on torch's stream; return a function that stops the timer and returns the seconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def stop() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return stop


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Capture `call` as a CUDA graph; return a function that launches the same work at once, on the same memory.

    `call` must have run before. It runs once more.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> object:
        graph.replay()
        return result

    return replay


def in_a_graph(by: Contender) -> Contender:
    """Return the same contender with a CUDA graph for each input set."""

    def make(shared: Inputs) -> Round:
        ready = by.make(shared)
        sets = range(len(shared.params))
        for k in sets:
            ready.run(k)
        replays = [captured(lambda k=k: ready.run(k)) for k in sets]  # type: ignore[misc]
        return replace(ready, run=lambda k: replays[k]())

    return replace(by, name=f"{by.name}, in a CUDA graph", make=make)


def kernels_alone(timed: Timed, calls: int = 4) -> dict[str, float]:
    """Return the seconds of each kernel and copy of a run on the GPU, by torch's profiler; empty if it sees none."""
    spent: Counter[str] = Counter()
    for number in range(calls):
        timed.prepare(number)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            timed.sample(number)
            torch.cuda.synchronize()
        spent.update({event.key: event.self_device_time_total / 1e6 / calls for event in seen.key_averages()})
    return {name: seconds for name, seconds in spent.items() if seconds > 0}


def contenders(row: Row, compiled: bool) -> list[Contender]:
    """Return the contenders of a row that can run on the GPU."""
    able = [c for c in row.contenders if not c.numpy and (compiled or not c.compiles)]
    able += [in_a_graph(c) for c in able if c.name == GRAPHED.get(row.name)]
    in_cupy = cupy_contenders.CONTENDERS.get(row.name) if find_spec("cupy") else None
    return able if in_cupy is None else [*able, in_cupy]


def same_bits(row: Row, case: Case, place: Gpu) -> bool:
    """Return whether a round of the row writes the same bits on the GPU as on the CPU."""
    found = []
    for shared in (inputs.make(case, 1), inputs.make(case, 1, place)):
        ready = row.contenders[0].make(shared)
        found.append({name: on_host(array).tobytes() for name, array in ready.after(ready.run(0)).items()})
    return found[0] == found[1]


def entrants(case: Case, row: Row, shared: Inputs, compiled: bool, failed: list[str]) -> list[Timed]:
    """Return the contenders of this row, ready to be timed; add those of other libraries that fail to `failed`."""
    found = []
    small = replace(case, d=min(case.d, CHECKED))
    few = inputs.make(small, 1, shared.place)
    for by in contenders(row, compiled):
        try:
            errors = entrant(small, row, by, few).errors
            timed = entrant(case, row, by, shared, checked=False)
        except Exception as error:
            if by.role == "ours":
                raise
            failed.append(f"{row.name}: {by.name} failed: {type(error).__name__}: {str(error).strip()[:120]}")
            continue
        timed.errors, timed.rest = errors, 0
        found.append(timed)
    return found


def probed(case: Case, shared: Inputs) -> list[Timed]:
    """Return the probes of the GPU's memory: torch's ways to move bytes."""
    return [replace(library_probes.timed(probe, case, shared), rest=0) for probe in PROBES]


def launches(place: Gpu, repeats: int) -> list[dict[str, Any]]:
    """Time calls that move almost no data, at d = 1: a launch, a launch and its result, and afflux's calls."""
    one, two, answer = (place.filled(1, 1) for _ in range(3))
    sweep = ops.Pass(one, two, ops.Combine([one], np.ones(1)), step=ops.Step("sgd", 0.5))
    calls: dict[str, Callable[[], object]] = {
        "torch zero_: one launch": answer.zero_,
        "torch zero_, item(): a launch that is waited for": lambda: answer.zero_().item(),
        "afflux: ops.apply": lambda: ops.apply(sweep),
        "afflux: ops.ingest": lambda: ops.ingest(one, two),
        "afflux: ops.gram": lambda: ops.gram([one]),
    }
    timed = [Timed(name, "", 0, lambda k, call=call: call(), rest=0) for name, call in calls.items()]  # type: ignore[misc]
    for each in timed:
        each.sample(0)
    measure_groups([[each] for each in timed], repeats, clock=events)
    return [report.figures(each) | {"gbps": None} for each in timed]


def case_of(row: Row, d: int) -> Case:
    return Case(d, 1 if row is INGEST else M, 1, device="cuda")


def fitting(rows: Sequence[Row], d: int, compiled: bool) -> int:
    """Return the largest d, at most the given one, at which all contenders of a row fit into memory."""
    able = [contenders(row, compiled) for row in rows]
    resident = max(sum(c.kept_bytes(d, M) for c in own) for own in able)
    passing = max(c.temporary_bytes(d, M) for own in able for c in own)
    needed = 1.1 * (inputs.shared_bytes(Case(d, M, 1), COPIED) + resident + passing)  # all of it is proportional to d
    free, _ = torch.cuda.mem_get_info()
    return d if needed <= free else int(d * free / needed)


def execute(case: Case, rows: Sequence[Row], place: Gpu, repeats: int, compiled: bool, failed: list[str]) -> Any:
    """Measure these rows in this case; the contenders of a row are freed before the next row's are made."""
    shared = inputs.make(case, COPIED, place)
    tried, timed_all = probed(case, shared), []
    for row in rows:
        own = entrants(case, row, shared, compiled, failed)
        measure_groups([[timed] for timed in (*own, *tried)], repeats, clock=events)
        for timed in own:
            timed.kernels = kernels_alone(timed)
            timed.sample = timed.prepare = lambda k: None  # frees their memory; the figures stay
        timed_all += own
    return report.of_case(case, list(rows), tried, timed_all)


def run(
    sizes: Sequence[int], place: Gpu, repeats: int = REPEATS, rows: Sequence[str] = tuple(ROWS), compiled: bool = True
) -> dict[str, Any]:
    """Run the rows; return the results in the form of the CPU's, and the times of launches."""
    chosen, notes, cases = [ROWS[name] for name in rows], [], []
    different = [row.name for row in chosen if not same_bits(row, case_of(row, CHECKED), place)]
    notes.append(f"NOT THE CPU'S BITS: {', '.join(different)}" if different else "all rows have the CPU's bits")
    notes.append(f"errors are those at d = {CHECKED:_}")
    for wanted in sizes:
        d = fitting(chosen, wanted, compiled)
        if d < wanted:
            notes.append(f"d = {d:_} in place of {wanted:_}, which this GPU's memory does not hold")
        plan = planned(chosen, lambda row, d=d: [case_of(row, d)])  # type: ignore[misc]
        cases += [execute(case, own, place, repeats, compiled, notes) for case, own in plan.items()]
    if not find_spec("cupy"):
        notes.append("CuPy is not installed")
    settings = {"repeats": repeats, "sets": 2, "compile": compiled, "notes": notes}
    box = machine.describe() | {"gpu": torch.cuda.get_device_name()}
    return report.results(box, chosen, cases, settings) | {"launches": launches(place, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda")
    parser.add_argument("--out", type=Path, help="a folder for bench.json and bench.md")
    parser.add_argument("--rows", choices=ROWS, nargs="+", default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("sizes", metavar="d", type=int, nargs="*", default=[D, SMALL])
    asked = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"no GPU bench: {reason}")
    out = run(asked.sizes, here(), asked.repeats, asked.rows)
    print(text := tables.to_markdown(out, tables.tables(out, [ROWS[name] for name in asked.rows])))
    if asked.out:
        asked.out.mkdir(exist_ok=True, parents=True)
        (asked.out / "bench.md").write_text(text, encoding="utf-8")
        (asked.out / "bench.json").write_text(report.to_json(report.without_samples(out)), encoding="utf-8")


if __name__ == "__main__":
    main()
