"""Control in C++ alone, without Python and without vectors, beside the model of a server's decisions."""

import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decisions as oracle
from builds import once, run
from conftest import ROOT, found

CXX = shutil.which(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler is installed")
CLIENTS, M = 5, 3
#: name: the options of the model.
SERVERS = {
    "both": {},
    "latest": {"duplicates": "latest", "max_staleness": 2},
    "reject": {"duplicates": "reject"},
    "flush": {"by_flush": True, "duplicates": "latest"},
    "passes": {"num_clients": CLIENTS},
    "limited": {"duplicates": "latest", "max_staleness": 2, "participations": 2},
    "limited-flush": {"duplicates": "reject", "participations": 1, "by_flush": True},
    "passes-stale": {"num_clients": CLIENTS, "max_staleness": 1, "by_flush": True},
}
CLIENT = st.sampled_from([*range(CLIENTS - 1), "ann"])
MOVES = st.one_of(
    *[st.tuples(st.just("push"), CLIENT, st.integers(0, 3), st.sampled_from([1, 1, 1, 0]))] * 5,
    st.tuples(st.just("push"), CLIENT, st.just(-1), st.just(1)),  # from a version that was never made
    st.tuples(st.just("late"), CLIENT, st.integers(0, 3)),  # with its staleness in place of a version
    *[st.tuples(st.just("task"), st.integers(0, 3), st.sampled_from([1, 1, 0]))] * 2,
    *[st.tuples(st.just("checkout"), CLIENT, st.sampled_from([-1, 2]))] * 2,
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.lists(CLIENT, max_size=4)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 2.0])),
    st.tuples(st.sampled_from(["flush", "discard", "reload", "end_pass", "commit"])),
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    def compile_it(folder):
        files = [found("control") / "main.cpp", ROOT / "engine" / "control" / "control.cpp"]
        warnings = ["-Wall", "-Wextra", "-Werror"]
        run(CXX, "-std=c++17", "-O1", *warnings, f"-I{ROOT / 'engine'}", *files, "-o", folder / "control")

    return once(tmp_path_factory, "control", compile_it) / "control"


def test_details(program):
    assert run(program, "details") == "done\n"


def text_of(client):
    return f"t{client}" if isinstance(client, str) else f"i{client}"


class Model(oracle.Admission):
    """The model, to which each line of the program's output says what has happened."""

    def __init__(self, **options):
        super().__init__(M, **options)
        self.joined_before = 0  # when the last round was decided
        self.version_before = 0  # the version before the round that the last push may have completed

    def move(self, move, facts, result):
        """Make the move, and return the expected result."""
        return getattr(self, f"{move}_of" if hasattr(self, f"{move}_of") else move)(*facts, result)

    def push_of(self, client, back, examples, result):
        version = int(result.split(",")[2])
        assert version <= max(0, self.version - back) if back >= 0 else version > self.version
        return self.outcome(self.push(client, version, None, examples), version)

    def late(self, client, staleness, result):
        return self.outcome(self.push(client, self.version - staleness), -1)

    def task(self, number, examples, result):
        return self.outcome(self.push(task=number, examples=examples), -1)

    def outcome(self, decision, version):
        status, staleness = decision
        join = self.number - 1 if status in oracle.STATUSES[:5] else -1
        step = self.version_before + 1 if status in ("joined", "replaced") else -1
        return f"{status},{-1 if staleness is None else staleness},{version},{join},{step}"

    def push(self, *facts, **options):
        self.version_before = self.version
        return super().push(*facts, **options)

    def checkout_of(self, client, lease, result):
        number = self.checkout(client, None if lease < 0 else lease)
        if number is None:
            return "blocked"
        version = int(result.split(",")[1])  # of the newest round that is committed
        client_id, _, deadline = self.tasks[number]
        self.tasks[number] = client_id, version, deadline
        return f"{number},{version}"

    def cancel_of(self, number, result):
        self.cancel(number)
        return ""

    def step_of(self, clients, result):
        return "".join(f"{status}," for status in self.step(clients))

    def wait(self, seconds, result):
        self.clock += seconds
        return "waited"

    def flush_of(self, result):
        self.flush()
        return ""

    def end_pass_of(self, result):
        self.end_pass()
        return ""

    def discard_of(self, result):
        return str(self.discard())

    def reload(self, result):
        self.tasks.clear()
        self.joined_before = self.counts["joined"]
        return ""

    def commit(self, result):
        return ""

    def round(self):
        super().round()
        self.joined_before = self.counts["joined"]

    def state(self):
        """What the program prints of its state, but for the tasks, which it closes later than the model."""
        counts = "".join(f"{self.counts[status]} " for status in [*oracle.STATUSES, "refused"])
        waiting = "".join(f"{text_of(client)},{version},{join} " for client, version, join in self.buffer)
        entered = "".join(f"{text_of(client)} " for client in [*self.entered, *self.participants])
        return [counts, str(self.number), str(self.version), waiting, entered, self.entries()]

    def entries(self):
        words = []
        for kind, *facts in self.log:
            if kind == "open":
                facts = [text_of(*facts)]
            elif kind == "join":
                facts[2] = text_of(facts[2])
            words.append(",".join([kind, *map(str, facts)]))
        return "".join(f"{word} " for word in words)

    def clients(self):
        """All clients of the log: the program knows these, and no others."""
        return len({facts[2] if kind == "join" else facts[0] for kind, *facts in self.log if kind in ("join", "open")})


def words_of(move):
    for word in move:
        yield from map(text_of, word) if isinstance(word, list) else [word]


@pytest.mark.parametrize("name", SERVERS)
@settings(max_examples=60, deadline=None)
@given(moves=st.lists(MOVES, max_size=40), flags=st.tuples(*[st.booleans()] * 3))
def test_control_decides_as_the_model(name, program, moves, flags):
    decide(program, name, moves, flags)


@pytest.mark.soak
@pytest.mark.parametrize("name", SERVERS)
@settings(max_examples=2000, deadline=None)
@given(moves=st.lists(MOVES, max_size=60), flags=st.tuples(*[st.booleans()] * 3))
def test_2000_schedules_of_control(name, program, moves, flags):
    decide(program, name, moves, flags)


def decide(program, name, moves, flags):
    """Compare each decision. `flags`: faults of memory, rounds that are committed late, rounds in drafts."""
    options = SERVERS[name]
    moves = [move for move in moves if move[0] != "end_pass" or "num_clients" in options]
    numbers = [options.get(name, -1) for name in ("max_staleness", "num_clients", "participations")]
    numbers += [options.get("by_flush", False), *flags]
    lines = [f"new {M} {options.get('duplicates', 'both')} {' '.join(str(int(number)) for number in numbers)}"]
    for kind, *facts in moves:
        if kind in ("push", "late", "checkout"):
            facts[0] = text_of(facts[0])
        lines.append(" ".join(str(word) for word in words_of([kind, *facts])))
    done = subprocess.run([program], input="\n".join(lines) + "\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = Model(**options)
    outputs = done.stdout.splitlines()
    assert len(outputs) == len(moves)
    for (move, *facts), output in zip(moves, outputs, strict=True):
        result, counts, since, number, version, waiting, entered, tasks, log, made, bases, known = output.split("\t")
        assert result == model.move(move, facts, result), (move, facts)
        assert [counts, number, version, waiting, entered, log] == model.state(), (move, facts)
        if move not in ("wait", "flush", "discard", "reload", "end_pass", "commit", "cancel"):
            assert tasks == "".join(f"{task} " for task in model.tasks)
        assert int(known) == model.clients()
        assert int(since) == model.counts["joined"] - model.joined_before
        oldest = int(made) - (model.max_staleness or int(made))
        if tasks == "".join(f"{task} " for task in model.tasks):
            assert int(bases) == len({pulled for _, pulled, _ in model.tasks.values() if pulled >= oldest})
