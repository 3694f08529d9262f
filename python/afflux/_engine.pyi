from collections.abc import Callable, Sequence
from typing import TypeVar, final

_T = TypeVar("_T")
_R = TypeVar("_R")

__version__: str
ORDER_VERSION: int
LANES: int
BLOCK: int
SUPERBLOCK: int
MOST_MEMORIES: int

class AffluxError(ValueError): ...
class UnavailableError(RuntimeError): ...

class Pool:
    held: int
    allocated: int
    buffer_bytes: int
    damaged: list[int]
    def __init__(self, size: int, dtype: str, max_buffers: int, checked: bool = False) -> None: ...

@final
class Buffer:
    dtype: str
    size: int
    checksum: int | None
    is_lent: bool
    def __init__(self, pool: Pool) -> None: ...
    @staticmethod
    def lent(vector: object, size: int, dtype: str) -> Buffer: ...
    def freeze(self, tag: int = 0) -> None: ...
    def intact(self) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def ingest(update: object, slot: object, num_threads: int) -> tuple[int, float, float, float]: ...
def gram(vectors: Sequence[object], out: object, num_threads: int) -> None: ...
def apply(
    params: object,
    out: object,
    combine: tuple[Sequence[object], object, float],  # updates, weights, params_weight
    calibrate: tuple[
        str,
        object,
        int,
        Sequence[object | None],
        Sequence[object | None],
        str | None,
        Sequence[tuple[int, float, float]],
        bool,
    ]
    | None,
    # kind, sum, num_clients, rows, new_rows, codec (None: exact), facts (key, low, high), quantize_direction
    step: tuple[str, float, float, float, float, float, Sequence[object]],
    # kind, lr, beta1, beta2, epsilon, root_scale, states
    memory: tuple[Sequence[object], object, object | None] | None,  # vectors, weights, next
    num_threads: int,
    done: list[bool] | None = None,
    dry: bool = False,
) -> None: ...
def exactly(function: Callable[[_T], _R], argument: _T) -> _R: ...
def row_bytes(codec: str, size: int) -> int: ...
def encode(codec: str, vector: object, row: object, key: int, low: float, high: float, num_threads: int) -> None: ...
def decode(codec: str, row: object, vector: object, num_threads: int) -> None: ...
def exp(x: float) -> float: ...
def log(x: float) -> float: ...
def pow(x: float, y: float) -> float: ...
def backends() -> list[tuple[str, str, bool, bool, bool, str]]: ...
def choose_isa(name: str) -> None: ...
