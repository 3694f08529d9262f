"""Laws of running times with options: their distributions, their names, traces, and the papers' staleness."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afflux.lab.tasks.registry import build_task
from afflux.rules.specs import parse_rule
from afflux.sim.workload.availability import Devices, availability_law
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.delays import (
    DELAYS,
    ConstantDelays,
    FadasDelays,
    HalfNormalDelays,
    delay_law,
    fadas_classes,
)
from bench.papers.staleness import simulate_staleness
from conftest import check_refused, generator
from made_runs import run
from test_data_sets import real


def draws(law, num_clients, count, seed=0):
    delay, times = law(num_clients, generator(seed)), generator(seed + 1)
    return np.array([[delay(client, times) for _ in range(count)] for client in range(num_clients)])


@pytest.mark.parametrize("gamma", [0.2, 1.0, 5.0])
def test_gamma_sets_the_shares_of_fadas_classes(gamma):
    found = draws(FadasDelays(50, 80, gamma), 2000, 1)[:, 0]
    shares = [((found >= low) & (found <= high)).mean() for low, high in ((1, 2), (3, 5), (50, 80))]
    assert abs(sum(shares) - 1) < 1e-12
    # argmax of Dirichlet(3g, 2g, g), from a sample of its own; five standard deviations of both.
    exact = np.bincount(generator(9).dirichlet((3 * gamma, 2 * gamma, gamma), 200_000).argmax(axis=1)) / 200_000
    for share, expected in zip(shares, exact, strict=True):
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) * (1 / 2000 + 1 / 200_000))


def test_a_smaller_gamma_gives_more_clients_of_large_delays():
    """FADAS, section 6: "A smaller gamma value corresponds to a higher proportion of clients experiencing large"."""
    large = [(fadas_classes(20_000, generator(), gamma) == 2).mean() for gamma in (0.1, 0.5, 1, 2, 10)]
    assert large == sorted(large, reverse=True)
    assert large[0] > 2 * large[2]


def test_fadas_without_options_draws_as_before():
    rng, times = generator(3), generator(4)
    classes = np.argmax(rng.dirichlet((3, 2, 1), size=20), axis=1)
    intervals = ((1.0, 2.0), (3.0, 5.0), (5.0, 8.0))
    wanted = [times.uniform(*intervals[classes[client]]) for client in range(20)]
    delay, times = delay_law("fadas-mild")(20, generator(3)), generator(4)
    assert [delay(client, times) for client in range(20)] == wanted


@pytest.mark.parametrize(
    ("name", "upper"), [("ca2fl", 5), ("ca2fl-1", 1), ("ca2fl-0.5", 0.5), ("ca2fl:upper=2.5", 2.5)]
)
def test_half_normal_laws_with_a_location(name, upper):
    found = draws(delay_law(name), 400, 300)
    locations = generator(0).uniform(0, upper, 400)
    beyond = found - locations[:, None]
    assert beyond.min() >= 0
    # |N(0, 1)|: mean sqrt(2/pi), variance 1 - 2/pi; five standard deviations.
    assert abs(beyond.mean() - math.sqrt(2 / math.pi)) < 5 * math.sqrt((1 - 2 / math.pi) / beyond.size)
    assert abs((beyond**2).mean() - 1) < 5 * math.sqrt(2 / beyond.size)
    assert beyond.max() > 3.5


def test_the_fixed_law_is_the_same_for_all_clients():
    rng = generator(0)
    law = delay_law("ca2fl-fixed")
    law(10, rng)
    assert rng.integers(2**62) == generator(0).integers(2**62), "nothing is drawn for the clients"
    found = draws(law, 50, 200)
    assert found.min() >= 5
    assert (found.min(axis=1) < 5.1).all()


SETTINGS = {
    # (law, M_c, M): tau_max and tau_avg, CA2FL's Tables 4 and 5.
    ("ca2fl", 15, 10): (3, 0.4888),
    ("ca2fl", 20, 10): (4, 0.9184),
    ("ca2fl", 25, 10): (5, 1.312),
    ("ca2fl", 20, 15): (2, 0.3264),
    ("ca2fl", 20, 5): (9, 2.6512),
    ("ca2fl-1", 20, 10): (6, 0.9092),
    ("ca2fl-0.5", 20, 10): (6, 0.8992),
}


def half_normal_scale(upper):
    """The other reading of the paper's halfnorm(s)."""

    def law(num_clients, rng):
        s = rng.uniform(0.0, upper, size=num_clients)
        return lambda client, times: float(s[client] * abs(times.standard_normal()))

    return law


@pytest.mark.parametrize(("name", "concurrency", "buffer_size"), SETTINGS)
def test_the_location_gives_ca2fls_largest_staleness_and_the_scale_does_not(name, concurrency, buffer_size):
    paper, mean = SETTINGS[name, concurrency, buffer_size]

    def staleness(law):
        given = {"num_clients": 100, "concurrency": concurrency, "buffer_size": buffer_size, "steps": 500}
        return [simulate_staleness(law, **given, seed=seed) for seed in range(3)]

    location = staleness(delay_law(name))
    assert min(abs(found.largest - paper) for found in location) <= 1
    assert max(abs(found.largest - paper) for found in location) <= 2
    scale = staleness(half_normal_scale(delay_law(name).upper))
    assert all(found.largest >= paper + 2 for found in scale)
    # When M start whenever M have finished, M_c - M are training at each start: the mean is (M_c - M)/M, but for the
    # first steps and the last ones. The paper's is up to 13 % smaller.
    for found in (*location, *scale):
        assert abs(found.mean - (concurrency - buffer_size) / buffer_size) < 0.04
        assert mean <= found.mean <= 1.16 * mean


def test_the_scale_reading_cannot_tell_the_papers_uniform_laws_apart():
    """Multiplying all times by a number changes no order; but the paper's Table 5 has tau_max 4, 6 and 6."""
    given = {"num_clients": 100, "concurrency": 20, "buffer_size": 10, "steps": 200}
    found = [simulate_staleness(half_normal_scale(upper), **given) for upper in (1.0, 2.0, 4.0)]
    assert len({(one.largest, one.mean, one.mean_largest) for one in found}) == 1
    assert found[2].time == 4 * found[0].time


def test_staleness_without_concurrency_and_with_equal_times():
    alone = simulate_staleness(delay_law("constant"), num_clients=3, concurrency=1, buffer_size=1, steps=7)
    assert (alone.largest, alone.mean, alone.mean_largest, alone.time) == (0, 0.0, 0.0, 7.0)
    # Four clients at once, one replaced at each arrival: the first four have staleness 0, 1, 2, 3, all others 3.
    four = simulate_staleness(delay_law("constant"), num_clients=4, concurrency=4, buffer_size=1, steps=10)
    assert (four.largest, four.mean) == (3, (0 + 1 + 2 + 7 * 3) / 10)
    assert simulate_staleness(delay_law("constant"), num_clients=4, concurrency=4, buffer_size=4, steps=9).largest == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ca3fl", "unknown delays 'ca3fl'.*ca2fl"),
        ("constant:gamma=1", "constant has no options"),
        ("fadas-large:gama=1", "unknown option of delays fadas-large: 'gama'.*gamma"),
        ("fadas-large:gamma", "'gamma' is not option=value"),
        ("fadas-large:gamma=0", "gamma is 0.0, must be from 1e-06"),
        ("fadas-large:gamma=nan", "gamma is nan"),
        ("fadas-large:gamma=many", "'many' is not a number"),
        ("fadas-mild:low=9", "low and high are 9.0 and 8.0"),
        ("fadas-mild:high=inf", "low and high"),
        ("ca2fl:upper=0", "upper is 0.0, must be positive"),
        ("ca2fl:s=-1", "s is -1.0, must be 0 or more"),
        ("fadas-large:gamma=1:gamma=2", "delays fadas-large:gamma=1:gamma=2: gamma is given twice"),
        ("constant:tied=8", "constant has no options"),
        ("ca2fl-fixed:tied=8", "all clients of this law are alike"),
        ("fadas-large:tied=8-9", "tied is 8-9, must be numbers of classes"),
    ],
)
def test_unknown_names_and_impossible_options(text, message):
    check_refused(message, delay_law, text)


def test_the_slowest_times_go_to_the_clients_with_most_examples_of_the_classes():
    labels = [np.arange(10).repeat(client + 1) if client % 3 else np.zeros(50, int) for client in range(60)]
    data = [(np.zeros(len(own)), own) for own in labels]
    tied, free = (
        delay_law("fadas-large:tied=8+9").of(data)(60, generator(5)),
        delay_law("fadas-large")(60, generator(5)),
    )
    means, plain = ([law(client, generator(client)) for client in range(60)] for law in (tied, free))
    assert sorted(mean > 30 for mean in means) == sorted(mean > 30 for mean in plain), "as many are slow"
    held = [2 * (client + 1) if client % 3 else 0 for client in range(60)]
    slow = sum(mean > 30 for mean in means)
    assert slow > 0
    assert {client for client in range(60) if means[client] > 30} == set(np.argsort(held, kind="stable")[-slow:])
    check_refused("needs the data of the clients", delay_law("fadas-large:tied=8+9"), 60, generator(5))
    check_refused("no client has such an example", delay_law("fadas-large:tied=11").of, data)
    check_refused("tied needs clients whose data sets are", delay_law("fadas-large:tied=1").of, [[1, 2]])


def test_a_run_has_the_tied_delays():
    config = SimConfig(model="logreg", num_clients=12, concurrency=6, arrivals=40, delays="fadas-large:tied=8+9")
    results = [run(parse_rule("fedbuff:buffer_size=2"), 3, config) for _ in range(2)]
    assert results[0].digest == results[1].digest
    data = build_task(config).data_for_seed(3)
    held = [int(np.isin(y, (8, 9)).sum()) for _, y in data]
    arrivals = np.bincount(results[0].clients, minlength=12)
    assert np.corrcoef(held, arrivals)[0, 1] < 0, "who holds them arrives less often"
    free = run(parse_rule("fedbuff:buffer_size=2"), 3, replace(config, delays="fadas-large"))
    assert free.digest != results[0].digest


def test_names_and_options():
    assert delay_law("constant") == ConstantDelays()
    assert delay_law("fadas-large") == FadasDelays(50, 80)
    assert delay_law("fadas-mild") == FadasDelays(5, 8)
    assert [delay_law(name) for name in ("ca2fl", "ca2fl-1", "ca2fl-0.5", "ca2fl-fixed")] == [
        HalfNormalDelays(),
        HalfNormalDelays(upper=1.0),
        HalfNormalDelays(upper=0.5),
        HalfNormalDelays(s=5.0),
    ]
    assert delay_law("fadas-large:gamma=.5") == FadasDelays(50, 80, 0.5)
    assert delay_law("fadas-large:high=60:low=55") == FadasDelays(55, 60)
    assert delay_law("ca2fl-fixed:s=3") == HalfNormalDelays(s=3)
    assert delay_law("ca2fl-fixed:s=none") == HalfNormalDelays()
    table = (Path(__file__).parents[2] / "docs" / "reference" / "data.md").read_text()
    assert all(f"`{name}`" in table for name in DELAYS)


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("device,start,end\na,2,7\n", "utf-16"),
        ("\ufeffdevice,start,end\na,2,7\n", "utf-16-be"),
        ("device;start;end\na;2;7\n", "utf-8-sig"),
        ("x\tdevice\tstart\tend\n\ta\t2\t7\n", "utf-8"),
        ('"device", start , end\r\n"a, b", 2 , 7\r\n', "utf-8"),
    ],
)
def test_tables_as_spreadsheets_write_them(tmp_path, content, encoding):
    path = tmp_path / "ready.csv"
    path.write_bytes(content.encode(encoding))
    assert Devices(str(path)).intervals() == [([2.0], [7.0])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no column device, start, end, it is empty"),
        ("device,start\na,1\n", "has no column end, only 'device, start'"),
        ("device;start;end\na;1,5;2\n", "has start '1,5' in line 2; expected: a finite number"),
        ("device,start,end\na,1,2\nb,3,x\n", "has end 'x' in line 3; expected: a finite number"),
        ("device,start,end\na,-1,2\n", "has start '-1' in line 2"),
        ("device,start,end\na,1,inf\n", "has end 'inf' in line 2"),
        ('device,start,end\n"1"2,0,1\n', "is no table in line 2"),
        ("device,start,end\na,5\n", "has 2 values in line 2; expected: 3, as in its first"),
        ("device,start,end\na,5,6,7\n", "has 4 values in line 2"),
        (b"device,start,end\n\xff,0,1\n", "cannot be read"),
        ("device,start,end\na,5,4\n", r"has an interval from 5\.0 to 4\.0"),
        ("device,start,end\na,5,9\na,8,12\n", "has intervals of device 'a' that overlap"),
        ("device,start,end\na,5,5\n", "has no interval with a length"),
        ("device,start,end\n", "has no interval with a length"),
        ("device,start,end\na,5,\n", r"has an interval from 5\.0 to 0\.0"),
    ],
)
def test_damaged_tables_of_intervals(tmp_path, content, message):
    path = tmp_path / "ready.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert "ready.csv" in str(check_refused(message, Devices(str(path)), 1, generator()))


def test_a_trace_is_looked_for_in_the_folder_of_the_data(tmp_path, monkeypatch):
    monkeypatch.delenv("AFFLUX_DATA", raising=False)
    check_refused(r"there is no file a\.csv; AFFLUX_DATA is not set", Devices("a.csv"), 1, generator())
    monkeypatch.setenv("AFFLUX_DATA", str(tmp_path))
    check_refused(r"there is no file a\.csv or in", Devices("a.csv"), 1, generator())
    (tmp_path / "a.csv").write_text("device,start,end\na,2,7\n")
    assert Devices("a.csv").intervals() == [([2.0], [7.0])]


def test_phones_that_are_ready():
    real("traces/flash_availability_intervals.csv")
    assert 600 < len(availability_law("phones").intervals()) <= 710
