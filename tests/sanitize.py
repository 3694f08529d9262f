"""Runs a selection of the suite on an extension that was built under a sanitizer; any finding fails the run.

python tests/sanitize.py thread             ThreadSanitizer
python tests/sanitize.py address            AddressSanitizer and UndefinedBehaviorSanitizer
python tests/sanitize.py thread --short     the selection that continuous integration runs
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

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
        {"ASAN_OPTIONS": "exitcode=66 detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},  # Python leaks at exit
    ),
}
SHORT = {
    "thread": ["test_concurrency.py", "test_stress.py"],
    "address": ["test_arrays.py", "test_buffers.py", "test_errors.py", "test_server.py", "test_stress.py"],
}
FULL = ["test_arrays.py", "test_buffers.py", "test_concurrency.py", "test_errors.py", "test_fork.py", "test_layout.py"]
FULL += ["test_log.py", "test_matrix.py", "test_models.py", "test_ops.py", "test_rules.py", "test_server.py"]
FULL += ["test_stress.py", "test_types.py"]


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def library(name: str) -> str | None:
    """The file that the compiler would link for a library of the sanitizer."""
    path = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return path.strip() if Path(path.strip()).is_absolute() else None


def build(kind: str, flags: str) -> Path:
    """A copy of the package around an extension of its own; returns the folder to import it from."""
    folder = ROOT / "build" / "sanitize" / kind
    package = folder / "python" / "afflux"
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DAFFLUX_PYTHON=ON", "-DAFFLUX_CUDA=off"]
    configure += ["-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS=-O1 -g {flags}", f"-DCMAKE_INSTALL_PREFIX={package}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    shutil.rmtree(package, ignore_errors=True)
    ours = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python" / "afflux", package, ignore=ours)
    for command in (configure, ["cmake", "--build", folder], ["cmake", "--install", folder]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=tools)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
    return package.parent


def main(kind: str, short: bool) -> int:
    flags, names, options = SANITIZERS[kind]
    found = [library(name) for name in names]
    if None in found:
        print(f"skipped: {compiler()} has no {names[found.index(None)]}")
        return 0
    print(f"building with {flags} ...", flush=True)
    package = build(kind, flags)
    environment = {
        **os.environ,
        **options,
        "LD_PRELOAD": " ".join(path for path in found if path),
        "PYTHONPATH": str(package),
        "AFFLUX_STRESS": "10000" if short else "40000",
    }
    tests = [str(ROOT / "tests" / name) for name in (SHORT[kind] if short else FULL)]
    # The run must be of that extension, and under the sanitizer: else nothing could be found.
    check = f"import afflux._engine as e, sys; sys.exit(not e.__file__.startswith({str(package)!r}))"
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in SANITIZERS or arguments[1:] not in ([], ["--short"]):
        sys.exit(__doc__)
    sys.exit(main(arguments[0], arguments[1:] == ["--short"]))
