"""Digests of what a run reads, by which a run that continues with other data is noticed."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import file_digest, sha256
from itertools import chain
from re import sub
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.sim.workload.availability import availability_law, trace_path
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Divided, Task

if TYPE_CHECKING:
    from torch import nn


DEEPEST = 20  #: levels of objects in objects that are read
_SCALARS = (str, bytes, int, float, complex, np.generic)


def input_digests(config: SimConfig, task: Task, data: Sequence[Any], module: "nn.Module") -> dict[str, str]:
    """Return the SHA-256 of each input of a run, by its name; an input whose bytes cannot be read has no entry.

    Args:
        config: the settings; the file of their availability is an input.
        task: the task.
        data: the data sets of the clients, for the seed of the run.
        module: the initial model, with the parameters that are not trained.
    """
    divided = data if isinstance(data, Divided) else None
    # An address in the text of a module is another one in each process.
    model = [sub(r" at 0x[0-9a-fA-F]+", "", str(module)), dict(module.state_dict())]
    inputs: dict[str, Any] = {"model": model, "clients": None if divided is None else divided.indices}
    if task.source is not None:
        inputs["data"] = task.source
    else:
        inputs["data"] = data if divided is None else [divided.x, divided.y]
        inputs["evaluation"] = task.evaluate if isinstance(task.evaluate, Classification) else None
        inputs["validation"] = task.validation
    digests = {name: digest for name, content in inputs.items() if (digest := content_digest(content)) is not None}
    if (trace := getattr(availability_law(config.availability), "file", None)) is not None:
        with trace_path(trace).open("rb") as file:
            digests["availability"] = file_digest(file, "sha256").hexdigest()
    return digests


def content_digest(content: Any) -> str | None:
    """Return the SHA-256, in hexadecimal, of arrays, tensors, numbers and texts in lists, tuples and mappings.

    Of another object the arrays among its attributes count, and those of attributes that are objects themselves, as in
    a Subset of a TensorDataset. None: there is nothing of all this.
    """
    digest, empty = sha256(), True
    for part in _parts(content, {}, scalars=True, depth=0):
        digest.update(part)
        empty = empty and len(part) == 1
    return None if empty else digest.hexdigest()


def _parts(content: Any, seen: dict[int, tuple[int, Any]], scalars: bool, depth: int) -> Iterator[Any]:
    """Yield the bytes of `content`.

    Args:
        content: any object.
        seen: the numbers of the arrays and objects that were read, by id; it holds them, so that ids stay unique.
        scalars: whether numbers and texts count: as attributes of objects they may be counters or paths.
        depth: number of objects around this one.
    """
    if content is None or depth > DEEPEST or isinstance(content, type | ModuleType | FunctionType):
        return
    if isinstance(content, _SCALARS):
        if scalars:
            yield f"{content!r}\n".encode("utf-8", "surrogatepass")
        return
    if id(content) in seen:
        yield f"again {seen[id(content)][0]}\n".encode()
        return
    seen[id(content)] = len(seen), content
    array = _array_of(content)
    if array is not None and not array.dtype.hasobject:
        # Dtype and shape come first, so that no two contents have the same bytes.
        dtype, shape = getattr(content, "dtype", array.dtype), getattr(content, "shape", array.shape)
        yield f"{dtype} {tuple(shape)}\n".encode()
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return
    items: Any = ()
    if isinstance(content, Mapping):
        items = chain.from_iterable(content.items())
    elif isinstance(content, list | tuple):
        items = content
    elif array is not None:
        items = array.reshape(-1).tolist()
    elif hasattr(content, "__dict__"):
        items, scalars = [value for _, value in sorted(vars(content).items())], False
    yield b"["
    for item in items:
        yield from _parts(item, seen, scalars, depth + 1)
    yield b"]"


def _array_of(content: Any) -> np.ndarray | None:
    """Return an array, the bytes of a tensor, or a list of numbers as an array; None for others."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(content, torch.Tensor):
        values = content.detach() if content.layout is torch.strided else content.detach().to_dense()
        return np.asarray(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    with suppress(Exception):  # code of the user's objects
        if hasattr(content, "__array__") or (isinstance(content, list | tuple) and isinstance(content[0], int | float)):
            array = np.asarray(content)
            return None if isinstance(content, list | tuple) and array.dtype.kind not in "biuf" else array
    return None
