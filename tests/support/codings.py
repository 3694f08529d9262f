"""Some codecs of each coding that rounds, from the engine's table."""

from itertools import groupby

from afflux.ops.codecs import ROUNDING

_CODINGS = [list(group) for _, group in groupby(ROUNDING, lambda codec: codec.coding)]
#: The widest and the narrowest of each coding, and one between.
EXTREMES = list(dict.fromkeys(codec for group in _CODINGS for codec in (group[0], group[-1])))
MIDDLES = [group[len(group) // 2] for group in _CODINGS]
