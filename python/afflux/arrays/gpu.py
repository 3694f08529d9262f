"""GPUs as devices: vectors are arrays of torch or CuPy, in memory of that library's allocator."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from afflux import ops
from afflux.arrays.devices import HOST, Device, as_list
from afflux.arrays.interop import Array, as_torch, gpu_of, is_cupy, is_torch
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.units import ITEM_BYTES

if TYPE_CHECKING:
    import torch


class Upload(NamedTuple):
    """A vector on the GPU that is being copied from the host, or was made on the GPU. After `wait`, any stream may use
    the vector.
    """

    array: Any
    done: Callable[[], bool] = lambda: True
    wait: Callable[[], None] = lambda: None


class Gpu(Device):
    """A GPU: the code that is the same for torch and CuPy."""

    #: The stream of uploads of each GPU. Uploads run one after the other, in parallel with the caller's work. A stream
    #: is never deleted, because memory that was allocated for it is reused in its order.
    _streams: ClassVar[dict[int, Any]]

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = self.alone = f"cuda:{index}"
        self._bounces: list[tuple[npt.NDArray[Any], Callable[[], bool]]] = []
        self._lock = Lock()

    def pool(self, size: int, dtype: str, limit: int, until_read: int = 0) -> "Arrays":
        return Arrays(self, size, dtype, limit)

    def take(self, pool: Any) -> Any:
        return pool.take()

    def _written(self, vector: Array) -> Array:
        self.wait()
        return vector

    @abstractmethod
    def pinned(self, size: int, dtype: str) -> npt.NDArray[Any]:
        """Return a new vector in pinned memory of the host, which the GPU can read and write."""

    @abstractmethod
    def _sent(self, source: npt.NDArray[Any]) -> Upload:
        """Return a copy of `source` on the GPU, allocated and written on the stream of uploads."""

    def upload(self, values: npt.NDArray[Any], *, pinned: bool) -> Upload:
        """Return a new vector with the values of a NumPy array. The caller may change the array at once. If the array
        is `pinned` memory itself, the caller may change it only after the upload is done.
        """
        if pinned:
            return self._sent(values)
        with self._lock:  # memory is reused when the copy from it is complete
            free = next((at for at, (_, is_read) in enumerate(self._bounces) if is_read()), None)
            bounce = None if free is None else self._bounces.pop(free)[0]
        if bounce is None or (bounce.size, bounce.dtype) != (values.size, values.dtype):
            bounce = self.pinned(values.size, values.dtype.name)
        np.copyto(bounce, values)
        upload = self._sent(bounce)
        with self._lock:
            self._bounces.append((bounce, upload.done))
        return upload

    @abstractmethod
    def owner(self, array: Array) -> object:
        """Return an object that exists as long as the array's memory is in use."""


class Torch(Gpu):
    """A GPU with torch's tensors. New tensors are made from an existing one, so that they are on its device."""

    _streams: ClassVar[dict[int, Any]] = {}

    def __init__(self, index: int, like: "torch.Tensor") -> None:
        super().__init__(index)
        self._like = like.detach().new_empty(0)

    def _type(self, dtype: str) -> Any:
        import torch

        return getattr(torch, dtype)

    # Tensors made within torch.inference_mode() could not be used outside it.
    def empty(self, size: int, dtype: str) -> Any:
        import torch

        with torch.inference_mode(False):
            return self._like.new_empty(size, dtype=self._type(dtype))

    def full(self, size: int, value: float, dtype: str) -> Any:
        import torch

        with torch.inference_mode(False):
            return self._written(self._like.new_full((size,), value, dtype=self._type(dtype)))

    def fill(self, vector: Any, values: npt.NDArray[Any]) -> None:
        if values.dtype == np.uint16:  # bfloat16's
            values, vector = values.view(np.int16), vector.view(self._type("int16"))
        self._written(vector.copy_(as_torch(values)))

    def copy(self, vector: Any) -> Any:
        copy = self.empty(vector.numel(), str(vector.dtype).removeprefix("torch."))
        return self._written(copy.copy_(vector))

    def pinned(self, size: int, dtype: str) -> npt.NDArray[Any]:
        import torch

        with torch.inference_mode(False):
            room = self._like.new_empty(size, dtype=self._type(dtype), device="cpu", pin_memory=True)
        values: npt.NDArray[Any] = room.numpy()
        return values

    def _sent(self, source: npt.NDArray[Any]) -> Upload:
        import torch

        stream: Any = self._streams.get(self.index)
        if stream is None:
            stream = self._streams.setdefault(self.index, torch.cuda.Stream(self.index))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), torch.inference_mode(False):
            array = self.empty(source.size, source.dtype.name).copy_(as_torch(source), non_blocking=True)
            event = stream.record_event()
        return Upload(array, event.query, event.synchronize)

    def owns(self, array: Array) -> bool:
        return is_torch(array)

    def alias(self, vector: Any) -> Any:
        return vector.detach()

    def owner(self, array: Array) -> object:
        return array.untyped_storage()

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream(self.index).synchronize()


class CuPy(Gpu):
    """A GPU with CuPy's arrays, made by its module with this device as the current one."""

    _streams: ClassVar[dict[int, Any]] = {}

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._cupy = sys.modules["cupy"]

    def pool(self, size: int, dtype: str, limit: int, until_read: int = 0) -> "Arrays":
        if dtype == "bfloat16":
            raise UnavailableError("[Server] slot_dtype is 'bfloat16', which CuPy lacks: pass torch tensors as params")
        return super().pool(size, dtype, limit)

    def empty(self, size: int, dtype: str) -> Any:
        with self._cupy.cuda.Device(self.index):
            return self._cupy.empty(size, dtype)

    def full(self, size: int, value: float, dtype: str) -> Any:
        with self._cupy.cuda.Device(self.index):
            return self._written(self._cupy.full(size, value, dtype))

    def fill(self, vector: Any, values: npt.NDArray[Any]) -> None:
        with self._cupy.cuda.Device(self.index):
            vector.set(np.ascontiguousarray(values))
        self.wait()

    def copy(self, vector: Any) -> Any:
        with self._cupy.cuda.Device(self.index):
            return self._written(vector.copy())

    def pinned(self, size: int, dtype: str) -> npt.NDArray[Any]:
        with self._cupy.cuda.Device(self.index):
            room = self._cupy.cuda.alloc_pinned_memory(max(1, size * np.dtype(dtype).itemsize))
        return np.frombuffer(room, dtype, size)

    def _sent(self, source: npt.NDArray[Any]) -> Upload:
        with self._cupy.cuda.Device(self.index):
            stream = self._streams.get(self.index)
            if stream is None:
                stream = self._streams.setdefault(self.index, self._cupy.cuda.Stream(non_blocking=True))
            with stream:
                array = self._cupy.empty(source.size, source.dtype)
                array.set(source, stream)
                event = stream.record()
        return Upload(array, lambda: bool(event.done), event.synchronize)

    def owns(self, array: Array) -> bool:
        return is_cupy(array)

    def alias(self, vector: Any) -> Any:
        return vector[:]

    def owner(self, array: Array) -> object:
        return array if array.base is None else array.base

    def wait(self) -> None:
        with self._cupy.cuda.Device(self.index):
            self._cupy.cuda.get_current_stream().synchronize()


class Arrays:
    """At most `limit` arrays of a GPU's library. An array is counted as long as its memory is in use."""

    def __init__(self, device: Gpu, size: int, dtype: str, limit: int) -> None:
        self._device = device
        self._size = size
        self._dtype = dtype
        self._limit = limit
        self._lock = Lock()
        self._coming = 0
        self._numbers = count()
        self._live: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.buffer_bytes = size * ITEM_BYTES[dtype]

    def take(self) -> Array:
        """Return a new array.

        Raises:
            AffluxError: `limit` arrays are held.
        """
        with self._lock:
            if self._limit and self.held >= self._limit:
                raise AffluxError(f"[Pool] all {self._limit} buffers of max_buffers are held")
            self._coming += 1
        try:  # not under the lock: an allocator may run other Python code, which may take a vector
            array = self._device.empty(self._size, self._dtype)
            self._live[next(self._numbers)] = self._device.owner(array)
            return array
        finally:
            with self._lock:
                self._coming -= 1

    @property
    def held(self) -> int:
        """The number of arrays that are in use or are being made."""
        return len(self._live) + self._coming

    def has(self, array: Array) -> bool:
        """Return whether the array's memory is that of an array of this pool."""
        owner = self._device.owner(array)
        return any(live() is owner for live in self._live.valuerefs())


def device_of(subject: str, parts: "Array | Sequence[Array]", names: Sequence[str]) -> Device:
    """Return the device of a server with these params.

    Raises:
        AffluxError: the params are on several devices.
        UnavailableError: the params are on a GPU, but this build or this machine does not support GPUs, or the params
            are neither torch's nor CuPy's arrays.
    """
    arrays = as_list(parts)
    places = [gpu_of(array) for array in arrays]
    for gpu, name in zip(places, names, strict=False):
        if gpu != places[0]:
            where = [HOST.name if at is None else f"cuda:{at}" for at in (places[0], gpu)]
            raise AffluxError(f"{subject} is on several devices: {names[0]} on {where[0]}, {name} on {where[1]}")
    first = places[0] if places else None
    if first is None:
        return HOST
    (why_not,) = [backend.why_not for backend in ops.backends() if backend.device == "cuda"]
    if why_not:
        raise UnavailableError(f"{subject} is on cuda:{first}, but {why_not}")
    if is_torch(arrays[0]):
        return Torch(first, arrays[0])
    if is_cupy(arrays[0]):
        return CuPy(first)
    raise UnavailableError(
        f"{subject} is a {type(arrays[0]).__name__} on cuda:{first}: a server on a GPU takes torch's or CuPy's arrays"
    )
