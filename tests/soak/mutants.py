"""Breaks the code on purpose, one line at a time, in a copy of the project, and checks that the suite notices.

make mutants                        all of them, an hour
python tests/soak/mutants.py cache tree  those whose name holds one of the words
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from afflux import _engine, ops
from mutants_engine import ENGINE
from mutants_rules import RULES
from mutants_server import SERVER
from mutants_sim import ADAPTERS, SIM

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())


def parsed(text: str) -> dict[str, tuple[str, str, str]]:
    """The mutants of a text by their names: what is broken, what stands in its place, the test file that should notice.

    A paragraph begins with the name of that test file. Each of its mutants is a line with a name, then as in a diff the
    broken lines or parts of lines, and those in their place. Neither file is named by its folder: what is broken stands
    once in all sources, the test file's name once under tests/.
    """
    mutants = {}
    for paragraph in text.strip().split("\n\n"):
        tests, *lines = paragraph.split("\n")
        for line in lines:
            if line[0] not in "+-":
                changes = {"-": [], "+": []}
                mutants[line] = changes, tests
            else:
                changes[line[0]].append(line[1:])
    return {name: ("\n".join(each["-"]), "\n".join(each["+"]), tests) for name, (each, tests) in mutants.items()}


MUTANTS = {name: mutant for text in (ENGINE, SERVER, RULES, SIM, ADAPTERS) for name, mutant in parsed(text).items()}

SOURCES = ("engine", "csrc", "python", "bench/papers")
SUFFIXES = {".py", ".pyi", ".hpp", ".cpp", ".cu", ".txt"}


def sources(project: Path) -> dict[Path, str]:
    """The text of every source file that a mutant may break."""
    files = [path for folder in SOURCES for path in (project / folder).rglob("*") if path.suffix in SUFFIXES]
    return {path: path.read_text() for path in files}


def place(texts: dict[Path, str], old: str, name: str = "") -> Path:
    """The one file in which the text stands that the mutant of this name breaks.

    Raises:
        LookupError: it stands nowhere, or more than once.
    """
    found = [path for path, text in texts.items() for _ in range(text.count(old))]
    if len(found) != 1:
        where = ", ".join(map(str, sorted(found))) or "nowhere"
        raise LookupError(f"the mutant {name!r} of mutants_*.py must break a text that stands once: {old!r} stands "
                          f"{len(found)} times: {where}")  # fmt: skip
    return found[0]


def find_test(project: Path, name: str) -> Path:
    """The one test file of that name, in whatever folder under tests/.

    Raises:
        LookupError: there is none, or there are several.
    """
    found = list((project / "tests").rglob(name))
    if len(found) != 1:
        raise LookupError(f"there are {len(found)} test files named {name}")
    return found[0]


def copy_of_the_project(folder: Path) -> Path:
    """What git tracks, as it stands in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(project: Path) -> None:
    """Builds the extension into the copy's package, for the best instruction set alone."""
    (isa,) = (b.name for b in ops.backends() if b.chosen)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = ["-DAFFLUX_PYTHON=ON", "-DAFFLUX_CUDA=off", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DAFFLUX_ISAS={isa}", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-O1 -g0"]
    package = project / "python" / "afflux"
    commands = [
        ["cmake", "-S", ".", "-B", "build", *configure, f"-DCMAKE_INSTALL_PREFIX={package}"],
        ["cmake", "--build", "build", "--parallel", "2"],
        ["cmake", "--install", "build"],
    ]
    for command in commands:
        subprocess.run(command, cwd=project, env=env, check=True, capture_output=True)


def suite_passes(project: Path, tests: str) -> bool:
    """Runs a test file of the copy against the copy's package."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", find_test(project, tests)]
    env = os.environ | {"PYTHONPATH": str(project / "python")}
    return subprocess.run(command, cwd=project, env=env, capture_output=True).returncode == 0


def main() -> int:
    words = sys.argv[1:]
    wanted = {name: m for name, m in MUTANTS.items() if not words or any(word in name for word in words)}
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        project = copy_of_the_project(Path(folder))
        texts = sources(project)
        places = {name: place(texts, m[0], name) for name, m in wanted.items()}
        if any(path.suffix != ".py" for path in places.values()):
            build(project)
        else:
            for library in Path(_engine.__file__).parent.glob("*.so"):
                shutil.copy(library, project / "python" / "afflux")
        for tests in sorted({m[2] for m in wanted.values()}):
            if not suite_passes(project, tests):
                print(f"{tests} fails without any mutant")
                return 2
        for name, (old, new, tests) in wanted.items():
            path = places[name]
            path.write_text(texts[path].replace(old, new))
            if path.suffix != ".py":
                try:
                    build(project)
                except subprocess.CalledProcessError as error:
                    print(f"{name} does not compile: {error.stdout.decode()[-2000:]}")
                    return 2
            survived = suite_passes(project, tests)
            path.write_text(texts[path])
            survivors += [name] if survived else []
            print(f"{'SURVIVED' if survived else 'killed':8}  {name}  ({tests})", flush=True)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
