"""Rules against hostile clients, and the need that a client is in a buffer once; Nesterov's momentum beside torch."""

from itertools import cycle

import numpy as np
import pytest
import torch

from afflux import Rule, Server, rules
from afflux.rules import calibration, weights
from afflux.rules.optimizers import Momentum
from afflux.rules.presets.krum import Krum
from conftest import check_error, push_all

D, CLIENTS, M = 60, 10, 10


def distance_after(rule, rng, hostile, attack, rounds=60):
    """Of params from the honest clients' mean optimum, of quadratics around ten points; the first are hostile."""
    optima = 1 + 0.3 * rng.standard_normal((CLIENTS, D))
    goal = optima[2:].mean(axis=0)
    server = Server(rule, np.zeros(D), num_clients=CLIENTS)
    for client in [*range(CLIENTS)] * rounds:
        params, sign = np.asarray(server.params), 1 if rule.kind == "update" else -1
        if rule.needs.handed_in and client % 5 == 0:
            server.set_rule_vector("validation", params - goal)
        update = 0.5 * (optima[client] - params) + 0.02 * rng.standard_normal(D)
        if client < hostile:
            update = attack(update, rng)
        server.push(client=client, version=server.version, **{rule.kind: sign * update})
    return float(np.linalg.norm(server.params - goal))


ATTACKS = {
    "sign flip": lambda update, rng: -4 * update,
    "noise": lambda update, rng: 20 * rng.standard_normal(D),
    "copies": lambda update, rng: np.full(D, -3.0),
}
ROBUST = {
    "krum": rules.krum(buffer_size=M, byzantine=2, server_lr=0.5),
    "multi_krum": rules.multi_krum(buffer_size=M, byzantine=2, server_lr=0.5),
    "fltrust": rules.fltrust(buffer_size=M, server_lr=0.5),
    "aflguard": rules.aflguard(server_lr=0.2),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", ROBUST)
def test_two_hostile_clients_of_ten_do_not_move_a_robust_rule(name, attack):
    """It ends within 1.2 times its error without hostile clients; the mean does not."""
    honest, attacked, mean = (
        distance_after(rule, np.random.default_rng(3), hostile, ATTACKS[attack])
        for rule, hostile in (
            (ROBUST[name], 0),
            (ROBUST[name], 2),
            (rules.fedbuff(buffer_size=M, server_lr=0.5, staleness=rules.staleness.Constant()), 2),
        )
    )
    assert attacked <= 1.2 * honest
    assert mean > 2 * attacked


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    ("rule", "lowest", "highest"),
    [(rules.fedmedian(buffer_size=M), [2, 3], [4, 5]), (rules.fedtrimmedavg(buffer_size=M), range(6), range(2, 8))],
    ids=["fedmedian", "fedtrimmedavg"],
)
def test_two_hostile_values_of_ten_move_an_order_statistic_by_at_most_two_places(rule, lowest, highest, attack, rng):
    """Of the eight honest values of each element, sorted, the result averages those from `lowest` to `highest`."""
    honest = rng.standard_normal((8, D))
    ranked, server = np.sort(honest, axis=0), Server(rule, np.zeros(D), dtype="float64")
    push_all(server, range(M), lambda i: honest[i] if i < 8 else ATTACKS[attack](honest[0], rng), version=0)
    rounding = 2 * M * 2.0**-53 * np.abs(honest).max()
    assert (ranked[[*lowest]].mean(axis=0) - rounding <= server.params).all()
    assert (server.params <= ranked[[*highest]].mean(axis=0) + rounding).all()


def flooded(**options):
    """Clients 0 and 1 are hostile, and send three of four arrivals."""
    rng, server = np.random.default_rng(0), None
    server = Server(rules.multi_krum(buffer_size=8, byzantine=2, keep=4), np.zeros(D), num_clients=CLIENTS, **options)
    hostile, honest = 30 * rng.standard_normal(D), cycle(range(2, CLIENTS))
    for k in range(400):
        if k % 4 < 3:
            client, update = k % 2, hostile + rng.standard_normal(D)
        else:
            client, update = next(honest), 0.5 * (1 - np.asarray(server.params)) + 0.01 * rng.standard_normal(D)
        server.push(client=client, version=server.version, update=update)
    return float(np.linalg.norm(server.params - 1)), server


def test_fast_hostile_clients_do_not_fill_a_buffer():
    distance, server = flooded()
    assert distance < 1
    assert (server.options.duplicates, server.counts["replaced"] > 0) == ("latest", True)
    assert flooded(duplicates="reject")[0] < 1
    check_error("'both': multi_krum needs each client once in a buffer: use 'latest'", flooded, duplicates="both")


def test_a_replacement_needs_each_client_once_too():
    """Before that, the buffer may have had a client twice."""
    part = weights.Uniform()
    once = Rule("mine", "update", 3, Krum(0), calibration.NONE, Momentum())
    server = Server(Rule("mine", "update", 3, part, calibration.NONE, Momentum()), np.zeros(2))
    check_error("inner products is False of the rule in force, True of the new one", server.replace_rule, once)


def test_scores_of_krum_by_hand():
    """Each is the sum of the squared distances to the two nearest of five: 1 and 9, 1 and 4, 4 and 9, ..."""
    server = Server(rules.krum(buffer_size=5, byzantine=1), np.zeros(1))
    for client, position in enumerate((0.0, 1.0, 3.0, 7.0, 20.0)):
        receipt = server.push(client=client, version=0, update=np.array([position]))
    assert receipt.report.rejected == ("score 10", "", "score 13", "score 52", "score 458")
    assert server.params.tolist() == [1.0]


@pytest.mark.parametrize("values", [(0.3, 0.7), (0.7, 0.3)])
def test_of_equal_scores_the_first_client_counts_as_smaller(values):
    """The two closest of three have one score, their squared distance, whatever is rounded."""
    server = Server(rules.krum(buffer_size=3), np.zeros(1), dtype="float64")
    push_all(server, (2, 1, 0), lambda client: np.array([(*values, 9.0)[client]]), version=0)
    assert server.params.tolist() == [values[0]]


def test_a_flushed_buffer_of_too_few_makes_no_step():
    server = Server(rules.krum(buffer_size=7, byzantine=2), np.zeros(2))
    push_all(server, range(6), np.ones(2), version=0)
    report = server.flush()
    assert (report.stepped, set(report.rejected), server.version) == (False, {"6 arrivals, fewer than 7"}, 0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rules.krum(buffer_size=6, byzantine=2), r"buffer_size is 6, must be at least 2 byzantine \+ 3, 7"),
        (lambda: rules.multi_krum(buffer_size=7, byzantine=2, keep=4), "keep is 4, must be at most .*, 3"),
        (lambda: rules.multi_krum(keep=0), "keep is 0"),
        (lambda: rules.krum(byzantine=-1), "byzantine is -1"),
        (lambda: rules.aflguard(most=-1.0), "most is -1"),
        (lambda: rules.diloco(delayed=0), "period is 0"),
        (lambda: rules.diloco(delayed=4, dampening=0.5), "dampening is 0.5, must be 0 with delayed"),
        (lambda: Momentum(dampening=1.0), "dampening is 1"),
        (lambda: Momentum(nesterov="yes"), "nesterov is 'yes'"),
    ],
)
def test_options_that_are_impossible(make, text):
    check_error(text, make)


@pytest.mark.parametrize(("size", "delayed"), [(1, None), (3, None), (3, 1)])
def test_diloco_is_torchs_nesterov_momentum(size, delayed, rng):
    """Delayed by one step, too."""
    updates = rng.standard_normal((30, D))
    server = Server(rules.diloco(buffer_size=size, delayed=delayed), np.zeros(D), dtype="float64")
    param = torch.nn.Parameter(torch.zeros(D, dtype=torch.float64))
    optimizer = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    for k in range(0, 30, size):
        push_all(server, range(size), lambda i, k=k: updates[k + i])
        param.grad = -torch.from_numpy(updates[k : k + size].mean(axis=0))
        optimizer.step()
    error = np.abs(server.params - param.detach().numpy())
    assert error.max() <= 30 * 8 * 2.0**-53 * np.abs(server.params).max() * 10  # 8 operations a step, velocity 10 |D|


def test_nesterov_without_momentum_is_sgd_and_a_dampening_scales_the_velocity(rng):
    """The first bit for bit; a dampened momentum is the same with a smaller rate."""

    def run(step):
        server = Server(Rule("mine", "update", 1, weights.Uniform(), calibration.NONE, step), np.zeros(D))
        draws = np.random.default_rng(1)
        push_all(server, [1] * 5, lambda _: draws.standard_normal(D))
        return server.params.tobytes()

    assert run(Momentum(0.5, 0.0, nesterov=True)) == run(rules.optimizers.Sgd(0.5))
    assert run(Momentum(0.5, 0.5, dampening=0.5)) == run(Momentum(0.25, 0.5))
