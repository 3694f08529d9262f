"""The walks of CONTRIBUTING.md lead where they say: through these files, at texts that are there, to a green suite."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mutants
from afflux import _engine
from conftest import ROOT, check_error
from walks import CODEC, OPTIMIZER, PRESET, WALKS, Walk, insert

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def steps(section):
    """The text of a section's numbered steps."""
    (body,) = re.findall(rf"^##+ {re.escape(section)}\n(.*?)(?=^##)", TEXT, re.DOTALL | re.MULTILINE)
    return re.findall(r"^\d\. .*?(?=^\d\. |^\S|\Z)", body, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.section)
def test_the_files_are_those_of_the_walk(walk):
    """Each step begins with the file that it changes; the codec's formula has one of two."""
    listed = [re.findall(r"`((?:engine|python|tests|docs)/[\w/.]+)`", step) for step in steps(walk.section)]
    assert len(listed) == len(walk.files)
    for paths, name in zip(listed, walk.files, strict=True):
        assert name in [path.replace("NAME", "slowmo") for path in paths]


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.section)
def test_the_texts_stand_once(walk, tmp_path):
    for name in walk.files | walk.tests:
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    insert(tmp_path, walk)


def test_a_text_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x\nx\n")
    for insertions, match in (([("x", "y")], "2 times"), ([("z", "y")], "0 times"), ([("", "y")], "there already")):
        check_error(match, insert, tmp_path, Walk("", {"a.py": insertions}, {}), error=LookupError)
    assert (tmp_path / "a.py").read_text() == "x\nx\n"


def run(project, *command):
    env = os.environ | {"PYTHONPATH": str(project / "python")}
    done = subprocess.run([sys.executable, *command], cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


def suite(project, *arguments):
    return run(project, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments)


def renewed(project):
    """The lines of golden.json that a walk changes, after they were renewed."""
    path = project / "python" / "afflux" / "selftest" / "golden.json"
    before, after = json.loads(path.read_text()), json.loads(run(project, "-m", "afflux.selftest.digest", "--golden"))
    path.write_text(json.dumps(after, indent=2))
    return {name for name in before | after if before.get(name) != after.get(name)}


@pytest.mark.soak
def test_a_preset(tmp_path):
    project = mutants.copy_of_the_project(tmp_path)
    for library in Path(_engine.__file__).parent.glob("*.so"):
        shutil.copy(library, project / "python" / "afflux")
    insert(project, PRESET)
    run(project, ".ci/lists")
    assert renewed(project) == {"slowmo"}
    assert "slowmo" in (project / "README.md").read_text()
    rules = [f"tests/rules/test_{name}.py" for name in ("rules", "rules_contract", "rules_page")]
    suite(project, *rules, "tests/server/test_streaming.py", "-k", "slowmo or page")


@pytest.mark.soak
def test_an_optimizer_and_a_codec(tmp_path):
    project = mutants.copy_of_the_project(tmp_path)
    insert(project, OPTIMIZER)
    insert(project, CODEC)
    mutants.build(project)
    assert renewed(project) == {"stages", "codecs", "tails"}
    suite(project, "tests/engine/test_stages.py", "tests/rules/test_composed.py")
    suite(project, "tests/engine/test_codecs.py")
    assert run(project, "-c", TWO_ROUNDS).split() == ["0.5", "1.0"]


#: params = 0 + .5 and .5 + .5
TWO_ROUNDS = """
import numpy as np
from afflux import Rule, Server
from afflux.rules import calibration, optimizers, weights

rule = Rule("own", "update", 1, weights.Uniform(), calibration.NONE, optimizers.Signs(0.5))
server = Server(rule, np.zeros(1, np.float32))
for version in range(2):
    server.push(client=1, version=version, update=np.ones(1, np.float32))
    print(server.params[0])
"""
