"""The rows against peers: native containers, flat vectors, a server's Adam, a small model, and whole models."""

from dataclasses import replace
from functools import partial

from bench.rows.fedbuff import FEDBUFF
from bench.rows.peers import adam, rounds
from bench.rows.peers.models import MODELS
from bench.spec.row import one_case
from bench.spec.streams import Streams

FLAT = replace(
    FEDBUFF,
    name="peers-flat",
    formula="params + lr / M sum_i u_i; from flat vectors that arrive one by one",
    counted="4 d (M + 2): M vectors and params read, params written",
    contenders=rounds.FLAT,
)
PEERS = [
    replace(
        FEDBUFF,
        name="peers-native",
        formula="sum_i w_i u_i, sum w = 1; native containers prebuilt",
        counted="4 d (M + 1): M vectors read, the mean written (afflux reads params, too, and adds the mean to them)",
        traffic=lambda m: (Streams(reads=(4,) * m, writes=(4,)),),
        reference=rounds.reference,
        contenders=rounds.NATIVE,
    ),
    FLAT,
    replace(
        FEDBUFF,
        name="peers-adam",
        formula="m = b1 m + (1-b1) D, v = b2 v + (1-b2) D^2, params + lr m / (sqrt(v) + eps); D = sum_i w_i u_i",
        counted="4 d (M + 6): M vectors and params read, params written, two moments read and written",
        traffic=lambda m: (Streams(reads=(4,) * m, in_place=(4,) * 3),),
        reference=adam.reference,
        contenders=adam.CONTENDERS,
    ),
    replace(
        FLAT,
        name="peers-small",
        formula="peers-flat at a small d: what each update costs, its share of the round included",
        counted="4 d (M + 2), as peers-flat",
        cases=partial(one_case, d=100_000, quick_d=10_000),
        columns=MODELS.columns,
    ),
    MODELS,
]
