"""Runs the same commands with this tree and with another commit, and compares all bits that they leave.

python tests/soak/same_runs.py BASE              BASE is a commit; minutes
python tests/soak/same_runs.py BASE grid store   the cases whose name holds one of the words

Bits of torch depend on the machine, so no digests are kept: both trees run here, at the same time. A killed
store and the folder of a grid that BASE has written are also resumed and continued by this tree. MNIST needs its file
in --data-dir or AFFLUX_DATA.

Not compared: in the headers of logs the version of afflux and the digests of rule and task files; the measured seconds
of the server; the ids of runs; files of models, records and bytes, the folder of a grid's test runs, digests of buffers
and the setting device, which BASE may not have; summaries, which come from the other tables; what pages and pictures
look like, and what commands print.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

import same_runs_inputs

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
HERE = Path(__file__).parent
LEFT_OUT = ("afflux", "code", "device")  #: of the header of a log
OUTPUT = "output.txt"  #: of the last program of a side
#: Files that BASE may not have, or that come from others.
FILES_LEFT_OUT = ("run_id.txt", "bytes.csv", "targets.csv", "sensitivity.png", "grid.md", "grid.png", "command.json")
STATES = "states.txt"  #: see `same_runs_task.evaluate`
ENGINE = ("engine", "csrc", "CMakeLists.txt")

SMALL = "--model logreg --num-clients 20 --concurrency 5 --buffer-size 5 --eval-every 20 --delays fadas-mild"
OWN = "--task own.py:task:width=12 --num-clients 20 --concurrency 5 --buffer-size 4 --eval-every 20 --alpha 0.5"
RULES = "ca2fl,mf_ca2fl:bits=4,fadas,wkafl,zenopp,fedasync"
OTHERS = "fedavg,fedadam,fedyogi,fedadagrad,fedams,afa_cd,afa_cs,twafl,sasgd,fedbuff:dialect=nvflare"
#: Arguments of `afflux compare`, by the name of the case.
COMPARISONS = {
    "rules, digits": f"--rules {RULES} {SMALL.replace('logreg', 'cnn')} --arrivals 80",
    "rules, mnist": f"--rules {RULES} {SMALL} --data mnist --arrivals 60",
    "passes": f"--rules gsgm,fedbuff {SMALL} --selection blocked-until-pass-ends --arrivals 100",
    "rounds": "--rules afa_cd,twafl,fedavg,ca2fl --model logreg --num-clients 10 --buffer-size 5 --eval-every 20 "
    "--protocol rounds --sampling biased --stale-models 3 --arrivals 100",
    "scaffold": f"--rules afa_cs,fedbuff {SMALL} --client-optimizer scaffold --control-codec bfloat16 --arrivals 100",
    "batchnorm": f"--rules fedbuff,ca2fl,ours=own.py:rule:server_lr=0.3 {OWN} --arrivals 100 --seeds 0,2",
    "paired": f"--rules fedbuff,ca2fl,fedasync,afa_cd {SMALL} --arrivals 100 --paired --seeds 1",
}
#: Arguments of `afflux run` whose process is killed, by the name of the case.
STORES = {
    "store, batchnorm": f"--rule own.py:rule {OWN} --arrivals 120",
    "store, digits": f"--rule ca2fl {SMALL} --client-optimizer scaffold --arrivals 120",
}
GRID = f"--rules fedbuff,own.py:rule {SMALL} --arrivals 60 --jobs 1 --grid client_lr=.05,.1 --grid server_lr=.5,1"
READ = """
import sys
from pathlib import Path
try:
    from afflux.lab import read_audit_log
except ImportError:  # of before there was a laboratory
    from afflux.sim import read_audit_log
for path in sorted(Path(sys.argv[1]).rglob("audit/*.jsonl")):
    log = read_audit_log(path)
    print(log.header.label, log.header.config["arrivals"], None if log.end is None else log.end.params_sha256)
    for line in log.arrivals[-1:]:
        print(line.number, line.client, line.staleness, line.loss)
    for line in log.rounds[-1:]:
        print(line.version, line.weights, line.rejected)
"""

Contents = dict[str, dict[str, list[str]]]
"""Kind -> file, or array -> lines."""


class DifferenceError(Exception):
    """The trees differ."""


@dataclass(frozen=True)
class Side:
    """A tree, and the folder in which its commands run."""

    name: str
    tree: Path
    folder: Path

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Start Python with this tree's package; its output goes to the file `OUTPUT`."""
        env = {name: text for name, text in os.environ.items() if not name.startswith("AFFLUX")}
        env |= {"PYTHONPATH": str(self.tree / "python"), "SAME_RUNS_STATES": str(self.folder / STATES)}
        with (self.folder / OUTPUT).open("w") as file:
            return subprocess.Popen([sys.executable, *arguments], cwd=self.folder, env=env, stdout=file, stderr=file)

    def output(self) -> str:
        return (self.folder / OUTPUT).read_text()[-3000:]


@dataclass(frozen=True)
class Trees:
    """Both trees, and the folder of MNIST."""

    base: Side
    new: Side
    data_dir: Path | None

    def run(self, *arguments: str, words: str = "", out: str | None = None) -> None:
        """Run a Python program with both trees at the same time.

        Args:
            arguments: of Python.
            words: further arguments, separated by spaces.
            out: the folder that the program makes; what evaluations have noted of models is moved there.
        """
        command = [*arguments, *words.split()]
        processes = {side: side.start(command) for side in (self.base, self.new)}
        statuses = {side: process.wait() for side, process in processes.items()}
        for side, status in statuses.items():
            if status:
                problem = f"{' '.join(command)}: the {side.name} ends with {status}: {side.output()}"
                raise SystemExit(f"error: {problem}") if side is self.base else DifferenceError(problem)
            if (states := side.folder / STATES).exists():
                states.unlink() if out is None else states.rename(side.folder / out / STATES)

    def afflux(self, *arguments: str, words: str = "", out: str | None = None) -> None:
        """Run the command line of both trees."""
        self.run("-m", "afflux", *arguments, *(() if out is None else ("--out", out)), words=words, out=out)

    def kill(self, words: str, folder: str, lines: int) -> None:
        """Run `afflux` with both trees; kill each of them when its log in the run folder has so many lines."""
        running = {side: side.start(["-m", "afflux", *words.split()]) for side in (self.base, self.new)}
        while running:
            for side, process in list(running.items()):
                ended = process.poll() is not None
                log = next((side.folder / folder).glob("audit/*.jsonl"), None)
                if log is not None and log.read_bytes().count(b"\n") >= lines:
                    process.kill()
                    process.wait()
                    del running[side]
                if ended:
                    raise SystemExit(f"error: the {side.name} ended before it was killed: {side.output()}")
            time.sleep(0.001)

    def compare(self, name: str, path: str) -> None:
        """Compare the folder of both trees with this path."""
        compare(name, *(contents(side.folder / path) for side in (self.base, self.new)))

    def take_over(self, path: str, copy: str) -> None:
        """Copy a folder of the base into the folders of both trees."""
        for side in (self.base, self.new):
            shutil.copytree(self.base.folder / path, side.folder / copy)


def contents(folder: Path) -> Contents:
    """Return what the files of a folder hold that must be equal."""
    kinds: Contents = defaultdict(dict)
    paths = folder.rglob("*") if folder.is_dir() else [folder]
    for path in sorted(path for path in paths if path.is_file() and path.name not in FILES_LEFT_OUT):
        if path.suffix == ".safetensors" or path.stem == "summary" or "test" in path.relative_to(folder).parts[:-1]:
            continue
        if path.name == "finished.jsonl" and (path.parent / "audit").is_dir():
            continue
        name = str(path.relative_to(folder))
        kinds["names of files"][name] = []
        if path.suffix == ".jsonl" and path.parent.name == "audit":
            header, *lines = path.read_text().split("\n")
            lines = [re.sub(r', ?"buffers_sha256": ?"\w+"', "", line) for line in lines]
            kinds["audit logs"][name] = [_without_left_out(header), *lines]
            kinds["params"][name] = [line for line in lines if line.startswith('{"type": "end"')]
        elif path.suffix == ".npz":
            for array, values in np.load(path).items():
                kind = "buffers" if "running_" in array or "num_batches" in array else "arrays"
                kinds[kind][f"{name} {array}"] = [f"{values.dtype} {sha256(values.tobytes()).hexdigest()}"]
        elif path.suffix == ".csv":
            kinds["tables"][name] = _lines_of_csv(path)
        elif path.suffix == ".json":
            kinds["tables"][name] = json.dumps(_without_seconds(_json(path.read_text())), indent=1).split("\n")
        elif path.suffix == ".jsonl":  # of a grid, whose test runs may be in a folder of their own
            kinds["tables"][name] = [line for line in path.read_text().split("\n") if '"part": "validation"' in line]
        elif path.suffix == ".md":
            kinds["tables"][name] = path.read_text().split("\n")
        elif path.name == STATES:
            for line in path.read_text().splitlines():
                kinds[line.split()[0]].setdefault(name, []).append(line)
    return dict(kinds)


def _json(text: str) -> object:
    return json.loads(text, parse_float=str)  # 1.0 and 1.00 differ


def _without_left_out(header: str) -> str:
    pairs = json.loads(header, parse_float=str, object_pairs_hook=list)
    return json.dumps([pair for pair in pairs if pair[0] not in LEFT_OUT])


def _without_seconds(content: object) -> object:
    if isinstance(content, dict):
        left_out = ("server_ms", "afflux", "buffers_sha256", "device")
        return {name: _without_seconds(value) for name, value in content.items() if name not in left_out}
    return [_without_seconds(item) for item in content] if isinstance(content, list) else content


def _lines_of_csv(path: Path) -> list[str]:
    text = path.read_text()
    header, *_ = rows = list(csv.reader(text.splitlines()))
    columns = [index for index, name in enumerate(header) if not name.startswith("server_ms")]
    if len(columns) == len(header):
        return text.split("\n")
    return [",".join(row[index] for index in columns) for row in rows]


def compare(case: str, base: Contents, new: Contents) -> None:
    """Compare kind by kind, and print a line.

    Raises:
        DifferenceError: with the first line that differs in each file of the first kind that differs.
    """
    if not base:
        raise SystemExit(f"error: {case}: there is nothing to compare")
    for kind in {**base, **new}:
        old, young = base.get(kind, {}), new.get(kind, {})
        problems = [
            f"{name} has only the {'base' if name in old else 'new tree'}" for name in sorted(old.keys() ^ young)
        ]
        problems += [
            f"{name}{_first_difference(old[name], young[name])}"
            for name in old
            if old[name] != young.get(name, old[name])
        ]
        if problems:
            raise DifferenceError(
                "\n".join([f"{case}: {kind} differ in {len(problems)} of {len(old)}", *problems[:10]])
            )
    print(f"same  {case}: {', '.join(f'{len(items)} {kind}' for kind, items in base.items())}", flush=True)


def _first_difference(base: list[str], new: list[str]) -> str:
    number = next((i for i, (a, b) in enumerate(zip(base, new, strict=False)) if a != b), None)
    if number is None:
        return f": {len(base)} lines in the base, {len(new)} in the new tree"
    a, b = base[number], new[number]
    start = max(0, next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) - 40)
    return (
        f", line {number + 1} from character {start}:\n  base {a[start : start + 120]}\n  new  {b[start : start + 120]}"
    )


def compared(words: str) -> Callable[[Trees, str], None]:
    """Return the case of an `afflux compare` with these arguments."""

    def case(trees: Trees, name: str) -> None:
        options, folder = f"{words} --jobs 1", name.replace(",", "").replace(" ", "-")
        if "--data mnist" in words:
            if trees.data_dir is None:
                print(f"skipped  {name}: give --data-dir, the folder of mnist.npz")
                return
            options += f" --data-dir {trees.data_dir}"
        trees.afflux("compare", words=options, out=folder)
        trees.compare(name, folder)

    return case


def killed(words: str) -> Callable[[Trees, str], None]:
    """Return the case of an `afflux run` whose store is killed and resumed, also the base's by the new tree."""

    def case(trees: Trees, name: str) -> None:
        stem = name.replace(", ", "-")
        whole, folder, store, taken = (f"{stem}-{part}" for part in ("whole", "killed", "store", "taken"))
        trees.afflux("run", words=words, out=whole)
        trees.compare(f"{name}: not killed", whole)
        trees.kill(f"run {words} --store {store} --checkpoint-every 0 --out {folder}", folder, 60)
        trees.take_over(store, f"{taken}-store")
        trees.take_over(folder, taken)
        trees.afflux("run", words=f"{words} --store {store}", out=folder)
        trees.afflux("run", words=f"{words} --store {taken}-store", out=taken)
        for side in (trees.base, trees.new):
            for result in (whole, folder, taken):  # a resumed run evaluates again
                (side.folder / result / STATES).unlink(missing_ok=True)
        for result, owner in {folder: "", taken: "the base's store, "}.items():
            title = f"{name}: {owner}killed and resumed"
            trees.compare(title, result)
            compare(
                f"{title}, as if not killed", *map(contents, (trees.base.folder / whole, trees.new.folder / result))
            )
        for place in (store, f"{taken}-store"):
            for exported, option in (("params.npz", "--params"), *([("rows.npz", "")] if "ca2fl" in words else [])):
                trees.afflux("store", "export", place, words=option, out=f"{place}-{exported}")
                trees.compare(f"{name}: {place}, {exported}", f"{place}-{exported}")

    return case


def tuned(trees: Trees, name: str) -> None:
    """A grid, and the base's grid continued with another value and another seed."""
    trees.afflux("compare", "--seeds", "0", words=GRID, out="grid")
    trees.compare(name, "grid")
    trees.take_over("grid", "wider")
    wider = GRID.replace("client_lr=.05,.1", "client_lr=.05,.1,.2")
    trees.afflux("compare", "--seeds", "0,1", words=wider, out="wider")
    trees.compare(f"{name}: the base's, continued", "wider")


def with_workers(trees: Trees, name: str) -> None:
    """Two processes that train."""
    trees.afflux("run", words=f"--rule ca2fl {SMALL} --arrivals 100 --workers 2", out="workers")
    trees.compare(name, "workers")


def short(trees: Trees, name: str) -> None:
    """Each format of data, network, law of delays and partition, in one process."""
    trees.run(str(HERE / "same_runs_inputs.py"), out="short")
    trees.compare(name, "short")


def in_python(trees: Trees, name: str) -> None:
    """Simulations in Python."""
    trees.run("own.py", "python", out="python")
    trees.compare(name, "python")


def read_logs(trees: Trees, name: str) -> None:
    """All logs of the base by both trees."""
    trees.run("-c", READ, str(trees.base.folder))
    outputs = [(side.folder / OUTPUT).read_text().splitlines() for side in (trees.base, trees.new)]
    compare(
        name, *({"facts": {f"line {i}": [line] for i, line in enumerate(lines)}} if lines else {} for lines in outputs)
    )


CASES: dict[str, Callable[[Trees, str], None]] = {
    **{name: compared(words) for name, words in COMPARISONS.items()},
    "all rules": compared(f"--rules {OTHERS} {SMALL} --arrivals 60"),
    **{name: killed(words) for name, words in STORES.items()},
    "workers": with_workers,
    "grid": tuned,
    "short runs": short,
    "in Python": in_python,
    "logs of the base, read": read_logs,
}


@contextmanager
def checked_out(base: str, folder: Path) -> Iterator[Path]:
    """Yield the tree of a commit with an engine: this tree's, if its sources are the same, or its own, compiled."""
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, base], cwd=ROOT, check=True)
    try:
        if subprocess.run(["git", "diff", "--quiet", base, "--", *ENGINE], cwd=ROOT).returncode:
            print("compiling the engine of the base", flush=True)
            import mutants

            mutants.build(tree)
        else:
            for library in (ROOT / "python" / "afflux").glob("*.so"):
                shutil.copy(library, tree / "python" / "afflux")
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("words", nargs="*", help="of the names of the cases; default: all")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AFFLUX_DATA"), help="the folder of mnist.npz")
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, checked_out(arguments.base, Path(name)) as tree:
        sides = [Side("base", tree, Path(name) / "base"), Side("new tree", ROOT, Path(name) / "new")]
        for side in sides:
            side.folder.mkdir()
            same_runs_inputs.write_data(side.folder / "data")
            shutil.copy(HERE / "same_runs_task.py", side.folder / "own.py")
        trees = Trees(*sides, arguments.data_dir)
        trees.run("-c", "import afflux; print(afflux.__file__)")
        for side in sides:
            if not Path(side.output().strip()).is_relative_to(side.tree):
                raise SystemExit(f"error: the {side.name} imports {side.output()}")
        try:
            for case in CASES:
                if not arguments.words or any(word in case for word in arguments.words):
                    CASES[case](trees, case)
        except DifferenceError as error:
            print(f"DIFFERENT  {error}")
            return 1
    print(f"the same in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
