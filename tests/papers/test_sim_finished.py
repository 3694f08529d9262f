"""A reproduction that was stopped goes on where it stopped, and ends with the page of one that was not."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import afflux.lab.runs.compare
from afflux.lab.outcomes import Outcome, load_outcomes
from afflux.lab.results.finished_runs import FILE, FinishedRuns, Job, line_of
from afflux.lab.results.run_result import Evaluation
from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import SimConfig
from bench.papers import table_pages
from bench.papers.command import app
from conftest import check_refused
from made_runs import run

CONFIG = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=20, eval_every=5, delays="fadas-mild")
FEDBUFF, CA2FL = parse_rule("fedbuff:buffer_size=4"), parse_rule("ca2fl:buffer_size=4")
JOBS = [Job(FEDBUFF, 0, config=CONFIG), Job(CA2FL, 0, config=CONFIG), Job(CA2FL, 1, config=CONFIG)]


def outcome_of(result):
    return Outcome.of_line(line_of(result))


def test_what_has_ended_is_found_again(tmp_path):
    path, result = tmp_path / FILE, run(CA2FL, 0, CONFIG)
    assert load_outcomes(path, JOBS) == {}
    FinishedRuns(path, JOBS)[1] = [result]
    assert load_outcomes(path, JOBS) == {1: outcome_of(result)}
    assert load_outcomes(path, JOBS[::-1]) == {1: outcome_of(result)}
    for other in (
        JOBS[0]._replace(seed=1),
        JOBS[1]._replace(spec=parse_rule("ca2fl:buffer_size=5")),
        JOBS[1]._replace(spec=parse_rule("ca2fl", {"buffer_size": 4})),
        JOBS[1]._replace(config=replace(CONFIG, client_lr=0.2)),
    ):
        assert load_outcomes(path, [other]) == {}, "another rule, seed, option or setting"
    here, elsewhere = (
        JOBS[1]._replace(config=replace(CONFIG, data="mnist", data_dir=folder)) for folder in ("here", "elsewhere")
    )
    FinishedRuns(path, [here])[0] = [result]
    assert load_outcomes(path, [elsewhere]) == {0: outcome_of(result)}


def test_a_line_that_was_cut_off_has_not_ended(tmp_path):
    path = tmp_path / FILE
    finished = FinishedRuns(path, JOBS)
    finished[0], finished[2] = [run(FEDBUFF, 0, CONFIG)], [run(CA2FL, 1, CONFIG)]
    assert load_outcomes(path, JOBS).keys() == finished.keys()
    path.write_bytes(path.read_bytes()[:-1])
    assert load_outcomes(path, JOBS).keys() == {0}
    FinishedRuns(path, JOBS)[1] = [run(CA2FL, 0, CONFIG)]
    assert load_outcomes(path, JOBS).keys() == {0, 1}, "the cut line is not glued to the next"


@pytest.mark.parametrize("text", ["[]\n", "no JSON\n", '{"afflux": "0"}\n', '{"rows": 1}\n'])
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / FILE
    path.write_text(text)
    check_refused(r"finished\.jsonl holds no finished runs: ", load_outcomes, path, JOBS)


def test_late_accuracy_is_the_mean_over_the_last_quarter():
    outcome = outcome_of(run(CA2FL, 0, CONFIG))
    assert [row.arrivals for row in outcome.evaluations] == [0, 5, 10, 15, 20]
    assert outcome.late_accuracy() == outcome.evaluations[-1].accuracy
    assert outcome.late_accuracy(0.5) == (outcome.evaluations[-1].accuracy + outcome.evaluations[-2].accuracy) / 2


@pytest.fixture
def small(monkeypatch):
    """Three codecs and two seeds, on so small a task that a run takes a moment; how often a run was made."""
    names = ("ca2fl", "mf_ca2fl:bits=8:codec=affine", "mf_ca2fl:bits=2:codec=affine", "mf_ca2fl:bits=2:codec=rotated")
    monkeypatch.setattr(table_pages, "CODEC_RULES", names)
    monkeypatch.setattr(table_pages, "CODEC_SETTINGS", {"digits": ("logreg", 40, 10)})
    made, run_paired = [], afflux.lab.runs.compare.simulate

    def counted(specs, seed, config, **options):
        made.append((specs[0].label, seed))
        if made.count("stop"):
            raise KeyboardInterrupt
        return run_paired(specs, seed, config, **options)

    monkeypatch.setattr(afflux.lab.runs.compare, "simulate", counted)
    return made


def invoke(out, *more):
    command = ["mf-ca2fl", "--seeds", "0,1", "--jobs", "1", "--out", str(out), *more]
    return CliRunner().invoke(app, command)


def test_a_reproduction_goes_on(small, tmp_path):
    straight = invoke(tmp_path / "straight")
    assert straight.exit_code == 0, straight.output
    every, out = list(small), tmp_path / "stopped"
    assert len(set(every)) == len(every) == 8
    small.clear()
    first = invoke(out, "--at-most", "3")
    assert first.exit_code == 2
    assert f"the finished runs are in {out}/; the same command with --out {out} continues" in first.stderr
    assert "error: 3 of 8 runs have ended" in first.stderr
    small.append("stop")
    assert invoke(out).exit_code == 130
    small.remove("stop")
    last = invoke(out)
    assert last.exit_code == 0, last.output
    assert small[:3] + small[4:] == every, "the fourth was begun twice, and no other"
    name = "mf-ca2fl-digits"
    for end in ("md", "json", "png"):
        assert (out / f"{name}.{end}").read_bytes() == (tmp_path / "straight" / f"{name}.{end}").read_bytes()
    small.clear()
    assert invoke(out).stdout == last.stdout
    assert not small, "all have ended"


def test_a_reproduction_that_ends_nothing_leaves_no_folder(small, tmp_path):
    small.append("stop")
    out = tmp_path / "out"
    assert invoke(out).exit_code == 130
    assert not out.exists()


def test_the_page_of_mf_ca2fl(small, monkeypatch):
    late = {0: (0.90, 0.89, 0.88, 0.86), 1: (0.80, 0.80, 0.78, 0.78)}

    def measure(jobs):
        assert {job.config.delays for job in jobs} == {"fadas-large"}
        outcomes = []
        for number, job in enumerate(jobs):
            result = outcome_of(run(CA2FL, 0, CONFIG))
            rows = tuple(Evaluation(*row[:3], late[job.seed][number % 4], row.loss) for row in result.evaluations)
            outcomes.append(Outcome(job.spec.label, job.seed, rows, 3))
        return outcomes

    monkeypatch.setattr(table_pages, "num_parameters", lambda config: 4096)
    page = table_pages.mf_ca2fl("digits", [0, 1], measure)
    assert table_pages.codecs_markdown(json.loads(json.dumps(page.content))) == page.markdown
    exact, eight, _, rotated = page.content["codecs"]
    sizes = [line["row_bytes"] for line in page.content["codecs"]]
    assert sizes == [4 * 4096, 64 + 4096 + 256, 64 + 1024 + 256, 64 + 1024 + 128]
    assert exact["difference"] == {"mean": 0, "std": 0, "seeds": 2}
    assert eight["difference"]["mean"] == pytest.approx(-0.005)
    assert rotated["difference"]["mean"] == pytest.approx(-0.03)
    assert page.content["from_8_bits"]["affine-2"]["mean"] == pytest.approx(-0.015)
    assert page.content["from_8_bits"]["rotated-2"]["std"] == pytest.approx(0.01 / 2**0.5)
    assert "| `affine-2` | 1,344 | 83.0 ± 7.1 | -2.0 ± 0.0 | 83.0 ± 7.1 |" in page.markdown
    check_refused("unknown data 'cifar'.* digits", table_pages.mf_ca2fl, "cifar", [0], measure)
