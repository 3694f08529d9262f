from collections.abc import Sequence
from typing import final

__version__: str
ORDER_VERSION: int
LANES: int
BLOCK: int
SUPERBLOCK: int

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
    def __init__(self, pool: Pool) -> None: ...
    def freeze(self, tag: int = 0) -> None: ...
    def intact(self) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def ingest(update: object, slot: object, num_threads: int) -> tuple[int, float, float, float]: ...
def gram(vectors: Sequence[object], out: object, num_threads: int) -> None: ...
def apply(
    params: object,
    out: object,
    updates: Sequence[object],
    weights: object,
    params_weight: float,
    lr: float,
    cached: bool,
    sum: object | None,
    num_clients: int,
    rows: Sequence[object | None],
    new_rows: Sequence[object | None],
    num_threads: int,
    done: list[None] | None = None,
) -> None: ...
def row_bytes(codec: str, size: int) -> int: ...
def encode(codec: str, vector: object, row: object, num_threads: int) -> None: ...
def decode(codec: str, row: object, vector: object, num_threads: int) -> None: ...
def backends() -> list[tuple[str, str, bool, bool, bool, str]]: ...
def choose_isa(name: str) -> None: ...
