"""The four rows against peers: native containers, flat vectors, a server's Adam, and a small model."""

from afflux.bench.columns import ERROR, SPEED, TIME, ULP, Column, Line, number
from afflux.bench.inputs import Case
from afflux.bench.peers import adam, rounds
from afflux.bench.row import Asked, Row, one_case

SMALL, QUICK_SMALL = 100_000, 10_000
TIMES_AFFLUX = number("x afflux's time", "times_afflux", ".2f")


def compare(lines: list[Line]) -> None:
    """Everyone's time over afflux's at the same size, and the microseconds that each update costs."""
    ours = {(line["d"], line["m"]): line["median"] for line in lines if line["name"] == "afflux"}
    for line in lines:
        line["times_afflux"] = line["median"] / ours[line["d"], line["m"]]
        line["us"] = 1e6 * line["median"] / line["m"]


def small(asked: Asked) -> list[Case]:
    return [Case(asked.d or (QUICK_SMALL if asked.quick else SMALL), asked.m or 10, asked.threads)]


def mean_bytes(d: int, m: int) -> int:
    return 4 * d * (m + 1)


def round_bytes(d: int, m: int) -> int:
    return 4 * d * (m + 2)


COLUMNS = (*TIME, TIMES_AFFLUX, ERROR, ULP)

PEERS = Row(
    name="peers",
    formula="sum_i w_i u_i, sum w = 1; native containers prebuilt",
    counted="4 d (M + 1): M vectors read, the mean written (afflux reads params, too, and adds the mean to them)",
    bytes=mean_bytes,
    reference=rounds.reference,
    cases=one_case,
    contenders=rounds.NATIVE,
    columns=COLUMNS,
    compare=compare,
)
PEERS_FLAT = Row(
    name="peers-flat",
    formula="params + lr / M sum_i u_i; from flat vectors that arrive one by one",
    counted="4 d (M + 2): M vectors and params read, params written",
    bytes=round_bytes,
    reference=rounds.reference,
    cases=one_case,
    contenders=rounds.FLAT,
    columns=COLUMNS,
    compare=compare,
)
PEERS_ADAM = Row(
    name="peers-adam",
    formula="m = b1 m + (1-b1) D, v = b2 v + (1-b2) D^2, params + lr m / (sqrt(v) + eps); D = sum_i w_i u_i",
    counted="4 d (M + 6): M vectors and params read, params written, two moments read and written",
    bytes=lambda d, m: 4 * d * (m + 6),
    reference=adam.reference,
    cases=one_case,
    contenders=adam.CONTENDERS,
    columns=COLUMNS,
    compare=compare,
)
PEERS_SMALL = Row(
    name="peers-small",
    formula="peers-flat at a small d: what each update costs, its share of the round included",
    counted="4 d (M + 2), as peers-flat",
    bytes=round_bytes,
    reference=rounds.reference,
    cases=small,
    contenders=rounds.FLAT,
    columns=(
        number("d", "d", "_d"),
        number("us an update", "us", ".1f"),
        Column("min .. max", lambda line: " .. ".join(f"{1e6 * line[end] / line['m']:.1f}" for end in ("min", "max"))),
        *SPEED,
        TIMES_AFFLUX,
        ERROR,
        ULP,
    ),
    compare=compare,
)
ROWS = [PEERS, PEERS_FLAT, PEERS_ADAM, PEERS_SMALL]
