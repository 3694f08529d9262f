"""The run folder: settings, tables and pictures of the results; audit/ beside them."""

import logging
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, TextIO

from msgspec import Struct

from afflux.ops.units import in_bytes
from afflux.ops.validation import printable
from afflux.sim.errors import ConfigError, ProcessKilledError, require
from afflux.sim.results.audit_log import FOLDER, AuditOutput, encode_json, file_stem
from afflux.sim.results.model_file import FOLDER as MODELS
from afflux.sim.results.run_result import RunResult, group_by_rule, summarise
from afflux.sim.results.statistics import data_frame, paired_differences
from afflux.sim.results.tensorboard import FOLDER as TENSORBOARD
from afflux.sim.workload.config import IMAGES, OF_PRESENCE, SimConfig
from afflux.sim.workload.inputs import package_versions
from afflux.sim.workload.selection import reads_results

#: Files with a table each, see `data_frame`.
CSV_TABLES = {
    "metrics.csv": "evaluations",
    "staleness.csv": "staleness",
    "participation.csv": "participation",
    "targets.csv": "targets",
    "summary.csv": "summary",
    "clients.csv": "clients",  # of a task that evaluates clients
}
FILES = ("config.json", *CSV_TABLES, "summary.json", "curves.png", "report.html")
FOLDERS = {FOLDER, TENSORBOARD, MODELS}
PACKAGES = (
    "matplotlib",
    "pandas",
    "jinja2",
    "safetensors",
    "sklearn",
)  #: they write the files; SciPy comes with the last one
#: File of a folder whose command runs, was killed, or finished no run; it is locked while the command runs.
UNFINISHED = "unfinished.txt"
_UNFINISHED_TEXT = """\
The command of this folder has not ended, or it has finished no run. The audit logs end at their last arrival.
"""
_ANY_COMMAND = "The next command with this folder as --out replaces the folder.\n"
_SAME_COMMAND = "The same command replaces the folder, if this one was killed: {digest}\n"
_LOGGER = logging.getLogger("afflux")
ANNOUNCE_ABOVE = 1e9  #: bytes of kept updates from which their size is announced


@contextmanager
def new_run_folder(
    out: Path, config: SimConfig, finished: Mapping[int, Sequence[RunResult]], runs: int, command: object = None
) -> Iterator[Path]:
    """Create a run folder for the block, which writes the results.

    After an error the finished results are written into the folder, and a note of the error says what the folder holds
    and how to go on; the folder is removed if nothing has arrived.

    Args:
        out: the folder.
        config: the settings.
        finished: results by the index of the run; the block fills it.
        runs: number of all runs.
        command: all on which the files depend, with a `repr`. Then the folder is marked by `UNFINISHED`: the same
            command replaces it if this one, or one of its processes, is killed, and any command if this one finishes no
            run. None: no command replaces it.

    Raises:
        ConfigError: see `create_run_folder`.
        MissingExtraError: a package that writes the results is not installed.
    """
    if command is not None:
        _remove_unfinished(out, _digest(command))
    folder = create_run_folder(out)
    marker = folder / UNFINISHED
    with ExitStack() as files:
        if command is not None:
            file = files.enter_context(marker.open("x", encoding="utf-8"))
            _lock(file)
            file.write(_UNFINISHED_TEXT + _SAME_COMMAND.format(digest=_digest(command)))
            file.flush()
        try:
            yield folder
        except BaseException as error:
            results = [result for index in sorted(finished) for result in finished[index]]
            if results:
                write_results(folder, results, config)
            killed, then = results and isinstance(error, ProcessKilledError), ""
            if not killed:
                marker.unlink(missing_ok=True)
            if remove_empty_logs(folder):
                if command is not None and not results:
                    marker.write_text(_UNFINISHED_TEXT + _ANY_COMMAND, encoding="utf-8")
                    then = f"; the next command with --out {quote(str(folder))} replaces it"
                elif command is not None and (killed or len(finished) < runs):
                    then = "; the same command replaces it" if killed else "; make the other runs with another --out"
                error.add_note(f"{len(finished)} of {runs} runs were finished; kept {folder}/{then}")
            raise
        marker.unlink(missing_ok=True)


def _digest(command: object) -> str:
    return sha256(repr(command).encode("utf-8", "surrogatepass")).hexdigest()


def _lock(file: TextIO) -> None:
    """Lock a file until it is closed, or its process ends; raise BlockingIOError if another process has locked it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ModuleNotFoundError, OSError):  # this system or file system has no such locks
        return


def dated_folder() -> Path:
    """Return the default run folder, runs/<date and time>."""
    return Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def create_run_folder(out: Path | None) -> Path:
    """Create the run folder.

    Args:
        out: the folder; None: `dated_folder`.

    Returns:
        The folder.

    Raises:
        ConfigError: `out` exists and is not an empty folder, or cannot be made.
    """
    folder = out or dated_folder()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        killed = "; if a run with --store was killed before its first checkpoint, remove it"
        then = killed if folder.is_dir() and {path.name for path in folder.iterdir()} <= FOLDERS else ""
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another --out{then}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder


def create_audit_folder(folder: Path, updates: bool = False) -> AuditOutput:
    """Create the folder of the audit logs in a run folder, and return it; `updates`: the runs keep their updates."""
    (folder / FOLDER).mkdir()
    return AuditOutput(folder / FOLDER, updates)


def announce_updates(folder: Path, size: int) -> None:
    """Log the size of the kept updates in bytes if it is large; raise ConfigError if the disk has too little space."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(f"the updates take {in_bytes(size)}, but {folder} has {in_bytes(free)} free")
    if size > ANNOUNCE_ABOVE:
        _LOGGER.warning("the updates will take %s in %s/%s", in_bytes(size), printable(str(folder)), FOLDER)


def _remove_unfinished(folder: Path, digest: str) -> None:
    """Empty a folder that `new_run_folder` has marked, unless it holds other files as well.

    Raises:
        ConfigError: the command of the folder still runs, or it was killed and was another one.
    """
    marker, logs = folder / UNFINISHED, [folder / name for name in FOLDERS if (folder / name).is_dir()]
    run_files = {marker, *logs, *(folder / name for name in FILES)}
    if not marker.is_file() or any(path not in run_files or path.is_symlink() for path in folder.iterdir()):
        return
    if any(path.suffix not in (".jsonl", ".npy") for path in (folder / FOLDER).glob("*")):
        return
    with marker.open(encoding="utf-8", errors="replace") as file:
        try:
            _lock(file)
        except BlockingIOError:
            raise ConfigError(f"another command writes to {folder}; choose another --out") from None
        text = file.read(1000)
        if text not in ("", _UNFINISHED_TEXT + _ANY_COMMAND):
            if not text.endswith(_SAME_COMMAND.format(digest=digest)):
                raise ConfigError(f"{folder} holds the logs of another command, which was killed; choose another --out")
            _LOGGER.warning("%s: this command was killed; it makes its runs again", folder)
        for path in logs:
            shutil.rmtree(path)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        marker.unlink()


def remove_empty_logs(folder: Path) -> bool:
    """Remove logs without an arrival, then empty folders; return whether the run folder still exists."""
    for log in (folder / FOLDER).glob("*.jsonl"):
        with log.open("rb") as file:
            empty = len(list(islice(file, 2))) < 2
        if empty:
            log.unlink()
            log.with_suffix(".updates.npy").unlink(missing_ok=True)
    for path in (folder / FOLDER, folder):
        # Fails for a folder that is not empty. An empty one is removed, so that the next run can use the same --out.
        with suppress(OSError):
            path.rmdir()
    return folder.exists()


def write_results(folder: Path, results: Sequence[RunResult], config: SimConfig) -> None:
    """Write all files of a comparison into `folder`; a file, or a link, of the same name is removed first."""
    require(*PACKAGES)
    from afflux.sim.results.figures import draw_comparison
    from afflux.sim.results.report_html import render_report

    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    configuration, setting = _configuration(results, config), describe_setting(config, results)
    (folder / "config.json").write_bytes(encode_json(configuration, indent=2))
    for name, table in CSV_TABLES.items():
        if table == "clients" and not any(run.client_evaluations for run in results):
            continue
        # Values as they are: whole numbers stay whole in a column with empty cells.
        frame = data_frame(results, table, config.target, dtype=object)
        missing = "" if table == "targets" else "nan"
        frame.to_csv(folder / name, index=False, lineterminator="\n", na_rep=missing, encoding="utf-8")
    (folder / "summary.json").write_bytes(encode_json(_summary(results, config), indent=2))
    draw_comparison(results, setting, config.target, folder / "curves.png")
    page = render_report(results, setting, config.target, configuration, _log_digests(folder, results))
    (folder / "report.html").write_text(page, encoding="utf-8")


def _summary(results: Sequence[RunResult], config: SimConfig) -> dict[str, Any]:
    return {
        "mean_and_std_over_seeds": {
            label: {name: value._asdict() for name, value in row.items()}
            for label, row in summarise(results, config.target).items()
        },
        f"paired_differences_of_final_{results[0].metrics[0].name}": [
            row._asdict() for row in paired_differences(results)
        ],
        "runs": [
            {
                "rule": run.spec.label,
                "seed": run.seed,
                "clients_with_data": run.num_clients,
                **run.summary(config.target),
                "participation": run.participation._asdict(),
                "decisions": run.decisions,
                "rejected": run.totals.rejected,
                "params_sha256": run.digest,
                **({"buffers_sha256": run.buffers_digest} if run.buffers_digest else {}),
            }
            for run in results
        ],
    }


def describe_setting(config: SimConfig, results: Sequence[RunResult]) -> str:
    """Return one line that describes the settings."""
    partition = config.partition
    if partition == "dirichlet":
        partition = f"Dirichlet({config.alpha:g})"
    seeds = len({run.seed for run in results})
    leaders = {run.leader for run in results} - {""}
    paired = f", all on the updates of {', '.join(sorted(leaders))}" if leaders else ""
    task = f"{config.data}, {config.model}, {_clients(results, config.num_clients)} ({partition})"
    if config.task != IMAGES:
        division = ", ".join(f"{name} {value}" for name, value in results[0].division.items() if name != "num_clients")
        total = results[0].division.get("num_clients", config.num_clients)
        task = f"{config.task}, {_clients(results, total)}{division and f' ({division})'}"
    arrivals = sorted({len(run.staleness) for run in results})
    at_once = f", {config.concurrency} at once" if "concurrency" in _settings_read(results, config) else ""
    laws = ("selection", *OF_PRESENCE)
    presence = "".join(f"{name} {getattr(config, name)}, " for name in laws if name in config.changed())
    own = ", each rule with dispatches of its own" if not leaders and reads_results(config.selection) else ""
    return (
        f"{task}{at_once}, delays {config.delays}, {presence}"
        f"{' to '.join(map(str, arrivals[:: max(len(arrivals) - 1, 1)]))} arrivals, "
        f"{seeds} seed{'s' if seeds > 1 else ''}{paired}{own}"
    )


def _clients(results: Sequence[RunResult], total: int) -> str:
    """Return how many of all clients hold data, which may depend on the seed."""
    least, most = (choose(run.num_clients for run in results) for choose in (min, max))
    if least == total:
        return f"{total} clients"
    return f"{least if least == most else f'{least} to {most}'} of {total} clients"


def _settings_read(results: Sequence[RunResult], config: SimConfig) -> dict[str, Any]:
    return {name: value for run in results for name, value in run.settings.items()} or asdict(config)


class RuleConfiguration(Struct, frozen=True):
    """A rule in config.json."""

    label: str
    name: str
    options: dict[str, Any]
    parts: dict[str, Any]
    updates_of: str


class Configuration(Struct, frozen=True):
    """The content of config.json."""

    simulation: dict[str, Any]
    division: dict[str, Any]
    rules: list[RuleConfiguration]
    seeds: list[int]
    versions: dict[str, str]
    machine: str


def _configuration(results: Sequence[RunResult], config: SimConfig) -> Configuration:
    rules = []
    for label, (run, *_) in group_by_rule(results).items():
        options = dict(run.options) or run.spec.plain_options()
        rules.append(RuleConfiguration(label, run.spec.name, options, dict(run.parts), run.leader or label))
    seeds = sorted({run.seed for run in results})
    settings, versions = _settings_read(results, config), package_versions() | {"python": platform.python_version()}
    return Configuration(settings, dict(results[0].division), rules, seeds, versions, platform.machine())


def _log_digests(folder: Path, results: Sequence[RunResult]) -> dict[str, str]:
    """Return the SHA-256 of the results' audit logs, by name."""
    found = {}
    for run in results:
        path = folder / FOLDER / f"{file_stem(run.spec.label, run.seed)}.jsonl"
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                found[path.name] = file_digest(file, "sha256").hexdigest()
    return found
