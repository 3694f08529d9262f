"""The parts that calibrate: per-client cached rows that enter the direction."""

from afflux.rule import Calibrate

#: The direction is the weighted sum of what arrived.
NONE = Calibrate(cached=False)

#: v = h + sum_i w_i (u_i - h_i), then h_i = u_i, with h the mean of all N rows (CA2FL, Wang et al. 2024, Algorithm 2).
#: Rows start at 0; v uses the old h and h_i. Keeps 4 d bytes per client seen, and 8 d for the sum.
CACHED_DIFFERENCE = Calibrate(cached=True)
