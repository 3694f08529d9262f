"""The cached rows of a round's clients after the round."""

from typing import Any

from afflux.rules.rule import ClientId

#: An array of NumPy, or of the library of the GPU.
Row = Any


class NewRows(dict[ClientId, Row]):
    """The clients that a round accepts, and their rows after the round."""

    clients = 0  #: the number of clients that have a row after the round
    sum_out: Row | None = None  #: the memory to which the sweep writes the sum; None: in place

    def __init__(self) -> None:
        super().__init__()
        #: The memory to which the sweep writes these rows, if they are kept on the host and the sweep runs on a GPU.
        self.staged: dict[ClientId, Row] = {}
