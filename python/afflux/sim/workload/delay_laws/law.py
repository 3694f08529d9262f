"""The types of a law of running times."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

Delay: TypeAlias = Callable[[int, np.random.Generator], float]
"""(client, stream) -> running time of one dispatch of the client, drawn from the stream."""
DelayLaw: TypeAlias = Callable[[int, np.random.Generator], Delay]
"""(number of clients, random stream for values that are fixed per client) -> Delay."""
