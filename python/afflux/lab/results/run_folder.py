"""The run folder: settings, tables and pictures of the results; audit/ beside them."""

import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from afflux.lab.results.audit_log import FOLDER, encode_json, file_stem
from afflux.lab.results.finished_runs import (
    AGAIN,
    FILE,
    FailedRun,
    FinishedRuns,
    Job,
    all_lines,
    line_key,
    lines_of_jobs,
    package_versions,
    read_line,
    result_facts,
    split_runs,
)
from afflux.lab.results.model_file import FOLDER as MODELS
from afflux.lab.results.run_result import RunResult, buffer_sizes, buffers_text, group_by_rule, summarise
from afflux.lab.results.statistics import data_frame, paired_differences
from afflux.ops.errors import ConfigError, StoreError, UnavailableError
from afflux.sim.errors import errors_of_writing, require
from afflux.sim.workload.config import OF_PRESENCE, RECORDED_IF_CHANGED, SimConfig
from afflux.sim.workload.selection import reads_results
from afflux.store.lock import LOCK, InUseError, Lock

#: Files with a table each, see `data_frame`.
CSV_TABLES = {"metrics.csv": "evaluations"}  # clients.csv: of a task that evaluates clients
CSV_TABLES |= {f"{name}.csv": name for name in ("staleness", "participation", "summary", "clients")}
FILES = ("config.json", *CSV_TABLES, "summary.json", "curves.png", "report.html")
OLD_FILES = ("targets.csv", "bytes.csv")  #: which an older afflux wrote, too
FOLDERS = {FOLDER, MODELS, "tensorboard"}  # the last one is of an older afflux
#: Settings that `describe_setting` names also if they have their defaults.
USUAL = ("data", "model", "concurrency", "delays")
#: They write the files; SciPy comes with the last one.
PACKAGES = ("matplotlib", "pandas", "jinja2", "safetensors", "sklearn")
#: File beside the logs of a run with a store: an id that no other store can know. A forged store may name any folder.
RUN_ID = "run_id.txt"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other commands out of a folder in the block, if its file system has locks; readers are not kept out.

    Raises:
        ConfigError: another command has it; the error names its process.
    """
    lock = None
    try:
        with suppress(UnavailableError):
            lock = Lock(folder)
    except StoreError as error:
        text = str(error).removeprefix("[store] ")
        if isinstance(error, InUseError):
            holder = text.rpartition(", and ")[2].replace("has a server there: close() it", "writes to it")
            text = f"{folder} is in use: {holder}; choose another --out"
        if "has no locks" not in text:
            raise ConfigError(text) from None
    try:
        yield
    finally:
        if lock is not None:
            with suppress(StoreError):  # the folder was removed meanwhile, and made anew by another command
                lock.refuse_removed(folder)
                (folder / LOCK).unlink(missing_ok=True)
            lock.close()


@contextmanager
def open_run_folder(
    jobs: Sequence[Job], config: SimConfig, output: Path, resumes: bool = False
) -> Iterator[FinishedRuns]:
    """Open a run folder for a block that makes runs, and writes the results.

    After an error the results of the finished runs are written into the folder, and a note of the error says what the
    folder holds and how to go on; the folder is removed if nothing has arrived.

    Args:
        jobs: the runs, with their settings.
        config: the settings for tables.
        output: the folder of the logs; the run folder around it is new or empty, or that of a command which had no
            other runs than `jobs`, however it has ended.
        resumes: whether the single run continues its files.

    Yields:
        The finished runs.

    Raises:
        ConfigError: see `create_run_folder`; or another command writes to the folder, or it has other runs.
        MissingExtraError: a package that writes the results is not installed.
    """
    folder = output.parent
    if resumes:
        folder.mkdir(parents=True, exist_ok=True)
    elif not _is_run_folder(folder):
        create_run_folder(folder)
    with locked(folder):
        record = _continued(folder, jobs, resumes)
        if not resumes:
            remove_run_files(folder, [job for index, job in enumerate(jobs) if index not in record])
        output.mkdir(exist_ok=True)
        record.open_runs()
        try:
            yield record
        except BaseException as error:
            results, failures = split_runs(record)
            if results:
                write_results(folder, results, config, failures)
            if remove_empty_logs(folder):
                count = len(record) - sum(run.status in AGAIN for run in failures)
                goes_on = f"; the same command with --out {folder} continues" if count < len(jobs) else ""
                error.add_note(f"{count} of {len(jobs)} runs were finished; kept {folder}/{goes_on}")
            raise


def _is_run_folder(folder: Path) -> bool:
    """Return whether a folder holds a record of runs without a store, and nothing that no command writes there."""
    if not (folder / FILE).is_file() or (folder / FOLDER / RUN_ID).exists():
        return False
    places = {True: FOLDERS, False: {LOCK, FILE, *FILES, *OLD_FILES}}
    return all(path.name in places[path.is_dir()] and not path.is_symlink() for path in folder.iterdir())


def _continued(folder: Path, jobs: Sequence[Job], resumes: bool) -> FinishedRuns:
    """Return the finished runs of a folder; raise ConfigError if it has runs of another command."""
    path = folder / FILE
    lines = all_lines([path])
    if resumes:  # the store has the command
        return FinishedRuns(path, jobs, more=result_facts)
    own = {line_key(line) for line in lines_of_jobs(lines, jobs, finished=False).values()}
    if any(line_key(line) not in own for line in lines):
        what = "the runs of another command, or of files that have changed"
        raise ConfigError(f"{folder} holds {what}; choose another --out")
    finished = lines_of_jobs(lines, jobs)
    ended = {index: read_line(folder, line) for index, line in finished.items()}
    record = FinishedRuns(path, jobs, more=result_facts, ended=ended)
    record.lines = finished
    return record


def remove_run_files(folder: Path, jobs: Sequence[Job]) -> None:
    """Remove the files of some runs; raise ConfigError if one cannot be removed, or is a folder."""
    for stem in (file_stem(spec.label, job.seed) for job in jobs for spec in (job.spec, *job.followers)):
        for path in (*(folder / FOLDER).glob("*"), *(folder / MODELS).glob("*")):
            if re.fullmatch(rf"{re.escape(stem)}(-\d+)?\.(jsonl|safetensors(\.new)?)", path.name):
                with errors_of_writing(path):
                    path.unlink()


def usable_path(path: Path | str) -> Path:
    """Return the path; raise ConfigError if there can be none, as with a name that is too long."""
    with errors_of_writing(Path(path)):
        Path(path).exists()
    return Path(path)


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
        ConfigError: `out` exists and is not an empty folder, or cannot be made. The lock of a killed command may be in
            it.
    """
    folder = out or dated_folder()
    if folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())):
        killed = "; if a run with --store was killed before its first checkpoint, remove it"
        then = killed if folder.is_dir() and {path.name for path in folder.iterdir()} <= FOLDERS else ""
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another --out{then}")
    with errors_of_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_empty_logs(folder: Path) -> bool:
    """Remove logs without an arrival, then empty folders; return whether the run folder still exists."""
    for log in (folder / FOLDER).glob("*.jsonl"):
        with log.open("rb") as file:
            empty = len(list(islice(file, 2))) < 2
        if empty:
            log.unlink()
    # Fails for a folder that is not empty. An empty one is removed, so that the next run can use the same --out.
    with suppress(OSError):
        (folder / FOLDER).rmdir()
        if {path.name for path in folder.iterdir()} <= {LOCK, FILE}:
            for name in (LOCK, FILE):
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    return folder.exists()


def write_results(
    folder: Path, results: Sequence[RunResult], config: SimConfig, failures: Sequence[FailedRun] = ()
) -> None:
    """Write all files of a comparison into `folder`; a file, or a link, of the same name is removed first.

    Raises:
        ConfigError: a file cannot be written, or a folder has its name.
    """
    require(*PACKAGES)
    from afflux.lab.results.figures import draw_comparison
    from afflux.lab.results.report_html import render_report

    for path in (folder / name for name in FILES):
        if path.is_dir() and not path.is_symlink():
            raise ConfigError(
                f"cannot write {path}: it is a folder; remove it, or choose another folder for the results"
            )
    with errors_of_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, *OLD_FILES):
            (folder / name).unlink(missing_ok=True)
        configuration, setting = _configuration(results, config), describe_setting(config, results, failures)
        (folder / "config.json").write_bytes(encode_json(configuration, indent=2))
        for name, table in CSV_TABLES.items():
            if table == "clients" and not any(run.client_evaluations for run in results):
                continue
            # Values as they are: whole numbers stay whole in a column with empty cells.
            frame = data_frame(results, table, config.target, dtype=object)
            frame.to_csv(folder / name, index=False, lineterminator="\n", na_rep="nan", encoding="utf-8")
        summary = _summary(results, config) | ({"failed": [run.facts() for run in failures]} if failures else {})
        (folder / "summary.json").write_bytes(encode_json(summary, indent=2))
        draw_comparison(results, setting, config.target, folder / "curves.png")
        page = render_report(results, setting, config.target, configuration, failures)
        (folder / "report.html").write_text(page, encoding="utf-8")


def _summary(results: Sequence[RunResult], config: SimConfig) -> dict[str, Any]:
    return {
        "buffer_sizes": buffer_sizes(results),
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
                "decisions": run.decisions,
                "rejected": run.totals.rejected,
                "params_sha256": run.digest,
                **({"buffers_sha256": run.buffers_digest} if run.buffers_digest else {}),
            }
            for run in results
        ],
    }


def describe_setting(config: SimConfig, results: Sequence[RunResult], failures: Sequence[FailedRun] = ()) -> str:
    """Return one line that describes the settings, and names the runs without a result."""
    read, total = _settings_read(results, config), results[0].division.get("num_clients", config.num_clients)
    least, most = (choose(run.num_clients for run in results) for choose in (min, max))  # depends on the seed
    holding = "" if least == total else f"{least} of " if least == most else f"{least} to {most} of "
    parts = [f"{holding}{total} clients"]
    for name in ("task", "data", "model", "concurrency", "delays", "selection", *OF_PRESENCE, "attack"):
        absent = SimConfig if results[0].settings and name in RECORDED_IF_CHANGED else config
        texts = dict.fromkeys(str(run.settings.get(name, getattr(absent, name))) for run in results)
        if name in read and (name in USUAL or [*texts] != [str(getattr(SimConfig, name))]):
            parts.append(f"{name} {' or '.join(texts)}")
    for name in (name for name in results[0].division if name != "num_clients"):
        parts.append(f"{name} {' or '.join(dict.fromkeys(str(run.division.get(name)) for run in results))}")
    arrivals = sorted({len(run.staleness) for run in results})
    parts.append(f"{' to '.join(map(str, arrivals[:: max(len(arrivals) - 1, 1)]))} arrivals")
    parts += [buffers_text(sizes)] if (sizes := buffer_sizes(results)) else []
    seeds, leaders = {run.seed for run in results}, {run.leader for run in results} - {""}
    count, total = len(seeds), len(seeds.union(run.seed for run in failures))
    parts.append(f"{'' if count == total else f'{count} of '}{total} seed{'s' if total > 1 else ''}")
    if leaders:
        parts.append(f"all on the updates of {', '.join(sorted(leaders))}")
    elif any(reads_results(str(run.settings.get("selection", config.selection))) for run in results):
        parts.append("each rule with dispatches of its own")
    return "; ".join([", ".join(parts), *map(str, failures)])


def _settings_read(results: Sequence[RunResult], config: SimConfig) -> dict[str, Any]:
    return {name: value for run in results for name, value in run.settings.items()} or asdict(config)


def _configuration(results: Sequence[RunResult], config: SimConfig) -> dict[str, Any]:
    """Return the content of config.json."""
    rules = []
    names = {name: value for run in results for name, value in run.settings.items()}
    differing = {name for run in results for name in names if run.settings.get(name, names[name]) != names[name]}
    for label, (run, *_) in group_by_rule(results).items():
        row: dict[str, Any] = {"label": label, "name": run.spec.name}
        row |= {"options": dict(run.options) or run.spec.plain_options(), "parts": dict(run.parts)}
        row["updates_of"] = run.leader or label
        settings = {name: value for name, value in run.settings.items() if name in differing}
        rules.append(row | ({"settings": settings} if settings else {}))
    return {
        "simulation": {n: value for n, value in _settings_read(results, config).items() if n not in differing},
        "division": dict(results[0].division),
        "rules": rules,
        "seeds": sorted({run.seed for run in results}),
        "versions": package_versions() | {"python": platform.python_version()},
        "machine": platform.machine(),
    }
