"""Runs a selection of the suite on an extension that was built under a sanitizer; any finding fails the run.

python tests/soak/sanitize.py thread             ThreadSanitizer
python tests/soak/sanitize.py address            AddressSanitizer and UndefinedBehaviorSanitizer
python tests/soak/sanitize.py thread --short     the selection that continuous integration runs
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())

#: flags of the compiler, libraries to load before Python, and options of the sanitizer
SANITIZERS = {
    "thread": (
        "-fsanitize=thread",
        ["libtsan.so"],
        {"TSAN_OPTIONS": "exitcode=66 halt_on_error=1 second_deadlock_stack=1"},
    ),
    "address": (
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer",
        ["libasan.so", "libubsan.so", "libstdc++.so"],  # the last one, so that exceptions can be followed
        {
            "ASAN_OPTIONS": "exitcode=66 detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },  # Python leaks at its end
    ),
}
#: Test files, by their names without test_. ThreadSanitizer goes without JAX, whose own threads it cannot follow.
SHORT = {
    "thread": "concurrency host_races stress",
    "address": "arrays buffers cut_vectors errors host_races policy server stress",
}
FULL = {
    "thread": "buffers concurrency cut_vectors host_races log models ops policy rules server stress types",
    "address": "arrays buffers concurrency cut_vectors errors fork host_races layout log matrix models ops policy "
    "rules server stress types",
}


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def library(name: str) -> str | None:
    """The file that the compiler would link for a library of the sanitizer."""
    path = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return path.strip() if Path(path.strip()).is_absolute() else None


def chosen_isa() -> str:
    """The instruction set that the engine chooses here."""
    code = "from afflux import ops; print(*[b.name for b in ops.backends() if b.chosen])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def build(kind: str, flags: str, isas: str) -> Path:
    """A copy of the package around an extension of its own; returns the folder to import it from.

    `isas`: the instruction sets to compile; empty: all.
    """
    folder = ROOT / "build" / "sanitize" / kind
    package = folder / "python" / "afflux"
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DAFFLUX_PYTHON=ON", "-DAFFLUX_CUDA=off"]
    configure += [
        "--log-level=WARNING",
        "-DCMAKE_BUILD_TYPE=None",
        f"-DCMAKE_CXX_FLAGS=-O1 -g1 {flags}",
        f"-DCMAKE_INSTALL_PREFIX={package}",
    ]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DAFFLUX_ISAS={isas}"]
    # With all checks in them, the bindings compile in 69 s of CPU in place of 102, and these tests take 13 s more.
    configure += [f"-DAFFLUX_BINDINGS_FLAGS={'-O0' if kind == 'address' else ''}"]
    shutil.rmtree(package, ignore_errors=True)
    ours = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python" / "afflux", package, ignore=ours)
    for command in (configure, ["cmake", "--build", folder], ["cmake", "--install", folder]):
        if subprocess.run(command, check=False, env=tools).returncode:
            sys.exit(f"failed: {' '.join(map(str, command))}")
    return package.parent


def main(kind: str, short: bool) -> int:
    flags, names, options = SANITIZERS[kind]
    libraries = [library(name) for name in names]
    if None in libraries:
        print(f"skipped: {compiler()} has no {names[libraries.index(None)]}")
        return 0
    print(f"building with {flags} ...", flush=True)
    package = build(kind, flags, chosen_isa() if short else "")
    # Into files: pytest keeps what a test prints, and a finding ends the process.
    reports = package.parent / "report"
    for old in reports.parent.glob("report.*"):
        old.unlink()
    environment = {
        **os.environ,
        **{name: f"{value} log_path={reports}" for name, value in options.items()},
        "OMP_NUM_THREADS": "1",  # nor can it follow torch's
        "LD_PRELOAD": " ".join(path for path in libraries if path),
        "PYTHONPATH": str(package),
        "AFFLUX_STRESS": "10000" if short else "40000",
    }
    selected = (SHORT if short else FULL)[kind].split()
    tests = [str(path) for name in selected for path in (ROOT / "tests").rglob(f"test_{name}.py")]
    assert len(tests) == len(selected)
    # The run must be of that extension, and under the sanitizer: else nothing could be found.
    check = f"import afflux._engine as e, sys; sys.exit(not e.__file__.startswith({str(package)!r}))"
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]
    code = subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode
    found = sorted(reports.parent.glob("report.*"))
    for report in found:
        print(report.read_text())
    return code or len(found)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in SANITIZERS or arguments[1:] not in ([], ["--short"]):
        sys.exit(__doc__)
    sys.exit(main(arguments[0], arguments[1:] == ["--short"]))
