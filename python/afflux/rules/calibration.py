"""The parts that calibrate: per-client cached rows that enter the direction.

Rows start at 0 and take 4 d bytes per client seen (8 d for float64), or what their codec takes; their float64 sum 8 d.
"""

from afflux.ops.codecs import Codec, Name, named
from afflux.rules.rule import Calibrate

#: The direction is the weighted sum of what arrived.
NONE = Calibrate(cached=False)

#: v = h + sum_i w_i (u_i - h_i), then h_i = u_i, with h the mean of all N rows (CA2FL, Wang et al. 2024, Algorithm 2).
#: v uses the old h and h_i; weights are normalised to sum to 1 over the accepted arrivals.
CACHED_DIFFERENCE = Calibrate(cached=True)

#: h_i = u_i, then v = h, the mean of all N rows (AFA-CS, Yang et al. 2022, Algorithm 3). Weights do not enter, but 0
#: rejects an arrival. Rows never seen count as 0.
CACHED_MEAN = Calibrate(cached=True, direction="mean")

#: The same, but the mean is over those clients that have a row.
CACHED_MEAN_OF_SEEN = Calibrate(cached=True, direction="mean", divide_by="seen")


def cached_difference(codec: Codec | Name | None = None, *, quantize_direction: bool = False) -> Calibrate:
    """CACHED_DIFFERENCE with rows that a codec stores: h_i = Q(u_i), and with `quantize_direction` v uses Q(u_i), too.

    >>> from afflux import codecs
    >>> cached_difference(codecs.affine(4)) == cached_difference("affine-4")
    True
    """
    return Calibrate(cached=True, codec=named(codec), quantize_direction=quantize_direction)
