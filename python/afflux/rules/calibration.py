"""The parts that calibrate: per-client cached rows that enter the direction.

Rows start at 0. Each client that has pushed takes 4 d bytes (8 d for float64), or the bytes of the codec. The float64
sum of the rows takes 8 d bytes.
"""

from afflux.ops.codecs import Codec, Name, named
from afflux.rules.rule import Calibrate

#: The direction is the weighted sum of the arrivals.
NONE = Calibrate(cached=False)

#: v = h + sum_i w_i (u_i - h_i), then h_i = u_i, with h the mean of all N rows (CA2FL, Wang et al. 2024, Algorithm 1).
#: v uses the old h and h_i; weights are normalised to sum to 1 over the accepted arrivals.
CACHED_DIFFERENCE = Calibrate(cached=True)

#: h_i = u_i, then v = h, the mean of all N rows (AFA-CS, Yang et al. 2022, Algorithm 3). Weights have no effect, except
#: that 0 rejects an arrival. Rows of clients that have never pushed count as 0.
CACHED_MEAN = Calibrate(cached=True, direction="mean")

#: The same, but the mean is over the clients that have a row.
CACHED_MEAN_OF_SEEN = Calibrate(cached=True, direction="mean", divide_by="seen")


def cached_difference(
    codec: Codec | Name | None = None, *, quantize_direction: bool = False, factor: float = 1.0
) -> Calibrate:
    """Return CACHED_DIFFERENCE with encoded rows: h_i = Q(u_i). With `quantize_direction`, v also uses Q(u_i). With a
    `factor` f (FedStale) v = f h + sum_i w_i (u_i - f h_i).

    >>> from afflux import codecs
    >>> cached_difference(codecs.affine(4)) == cached_difference("affine-4")
    True
    """
    return Calibrate(cached=True, codec=named(codec), quantize_direction=quantize_direction, factor=factor)
