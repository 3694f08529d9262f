"""`ingest` of one vector, on all threads: a copy, the check that all values are finite, and the norm."""

from functools import partial

import numpy as np

from bench.measure.library_probes import threaded
from bench.rows.server import push
from bench.spec.arrays import as_tensor
from bench.spec.columns import ROLE, TIME, TIMES_OURS
from bench.spec.contender import REST_OF_OPENBLAS, Contender, Round, best, ours, plain
from bench.spec.inputs import Float32, Inputs
from bench.spec.row import Row, one_case
from bench.spec.streams import Streams


def afflux_round(inputs: Inputs) -> Round:
    return push.into_slots(partial(push.ingest, num_threads=inputs.num_threads))(inputs)


def numpy_copy(inputs: Inputs) -> Round:
    """Return a contender that copies with NumPy.

    A copy by NumPy uses one thread, so each of our threads copies a part.
    """
    parts = threaded(inputs.num_threads, inputs.d)

    def copy(slot: Float32, vector: Float32) -> None:
        parts(lambda s: np.copyto(slot[s], vector[s]))

    return push.into_slots(copy, measured=False)(inputs)


def numpy_careful(inputs: Inputs) -> Round:
    parts = threaded(inputs.num_threads, inputs.d)

    def take(slot: Float32, vector: Float32) -> float:
        return float(np.linalg.norm(parts(lambda s: push.numpy_careful(slot[s], vector[s]))))

    return push.into_slots(take)(inputs)


CONTENDERS = [
    ours("afflux", "ops.ingest", afflux_round, push.slots),
    Contender("numpy copyto", "np.copyto(slot, u)", numpy_copy, push.slots, caveat=push.ONLY_COPIES, numpy=True),
    Contender(
        "numpy, careful",
        "copyto, isfinite(slot).all(), linalg.norm(slot)",
        numpy_careful,
        push.slots,
        temporary=0.25,
        numpy=True,
        rest=REST_OF_OPENBLAS,
    ),
    plain(
        "torch, careful",
        "copy_, isfinite(slot).all(), linalg.vector_norm(slot)",
        push.into_slots(push.torch_careful, as_tensor),
        push.slots,
        temporary=2,
    ),
    best(
        "torch copy_",
        "slot.copy_(u)",
        push.into_slots(push.torch_copy, as_tensor, measured=False),
        push.slots,
        caveat=push.ONLY_COPIES,
    ),
]

INGEST = Row(
    name="ingest",
    formula="slot = u; all of u finite? |u|",
    counted="8 d: a vector read, a slot written",
    traffic=lambda m: (Streams(reads=(4,), writes=(4,), times=m),),
    reference=push.reference,
    cases=partial(one_case, m=1),
    contenders=CONTENDERS,
    output="norms",
    columns=(ROLE, *TIME, TIMES_OURS, push.NORM_ERROR),
)
