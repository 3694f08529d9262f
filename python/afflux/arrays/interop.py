"""Single arrays of any library: their dtypes, their use by the engine without a copy, and writing to them."""

import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import islice
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from afflux import ops
from afflux._engine import Buffer, Parts, Pool, all_own
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import dtype_name, raise_if_from_signal

if TYPE_CHECKING:
    import torch

#: Any array with a shape and the buffer protocol or DLPack.
Array = Any

_dtype_name = cache(dtype_name)
#: Devices of DLPack: CUDA, and its managed memory.
_GPUS = (2, 13)

#: The modules of arrays that are no wrappers of others.
_PLAIN = frozenset({"numpy", "torch", "torch.nn.parameter"})

#: The types that the engine reads as they are.
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_INTEGERS = frozenset({"bool"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
REAL = FLOATS | _INTEGERS


def label(name: str) -> str:
    """Return the name for messages, or "the tree" for the empty name of a tree that is a single array."""
    return name or "the tree"


def kind_of(name: str, array: Array) -> str:
    """Return the name of the array's dtype.

    Raises:
        AffluxError: the dtype is neither float, integer nor bool, or the array is a masked array, or a torch tensor
            that is sparse or holds no data.
    """
    if is_masked(array):
        raise AffluxError(f"[layout] {label(name)} is a masked array: give its filled() values")
    kind = type_of(name, array)
    if kind not in REAL:
        advice = (
            ": give its dequantize()" if hasattr(array, "dequantize") and kind.startswith(("qint", "quint")) else ""
        )
        expected = "floats of 16, 32 or 64 bits, integers or bools"
        raise AffluxError(f"[layout] {label(name)} is {kind}, expected {expected}{advice}")
    if is_torch(array):
        if str(array.layout) != "torch.strided" or array.is_meta:
            raise AffluxError(f"[layout] {label(name)} is {array.layout} on {array.device}, expected a dense tensor")
        require_memory(f"[layout] {label(name)}", array)
    return kind


def check_shape(name: str, array: Array, expected: tuple[int, ...]) -> None:
    """Raise AffluxError if an array of a tree has another shape than in the layout."""
    shape = tuple(getattr(array, "shape", ()))
    if shape != expected:
        raise AffluxError(f"[layout] {label(name)} has shape {shape}, the layout has {expected}")


def require_memory(subject: str, array: Array) -> None:
    """Raise AffluxError for a tensor of a class that only wraps other tensors, as of DTensor and of torchao."""
    cls = type(array)
    if cls.__module__ in _PLAIN or not is_torch(array):
        return
    call = "full_tensor" if hasattr(cls, "full_tensor") else "dequantize"
    if call == "full_tensor" or hasattr(cls, "__tensor_flatten__"):
        raise AffluxError(
            f"{subject} is a {cls.__name__}, which holds no memory of its own: give the result of its {call}()"
        )


def is_masked(array: Array) -> bool:
    """Return whether the array is a masked array of NumPy, whose memory also holds the masked values."""
    return type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray)


def type_of(name: str, array: Array) -> str:
    """Return the name of the dtype of an array of any library."""
    return _dtype_name(array.dtype if hasattr(array, "dtype") else _as_numpy(name, array).dtype)


def types_of(arrays: Iterable[Array]) -> set[str]:
    """Return the names of the dtypes of arrays; each dtype is looked at once."""
    return {type_of("", array) for array in {getattr(array, "dtype", id(array)): array for array in arrays}.values()}


def is_torch(array: Array) -> TypeGuard["torch.Tensor"]:
    """Return whether the array is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_parameter(array: Array) -> bool:
    """Return whether the array is a parameter of a torch module, without importing torch."""
    return is_torch(array) and isinstance(array, sys.modules["torch"].nn.Parameter)


def as_held(arrays: list[Array]) -> list[Array]:
    """Return arrays whose memory the engine holds while it reads them: a tensor may be given other memory (set_,
    .data =), but not the tensor that its detach() returns. With the C functions of DLPack the engine holds it.
    """
    torch = sys.modules.get("torch")
    if torch is None or (hasattr(torch.Tensor, "__dlpack_c_exchange_api__") and all_own(arrays)):
        return arrays
    return [array.detach() if is_torch(array) else array for array in arrays]


def memory_of(array: Array) -> tuple[Any, ...] | None:
    """Return what is equal for two arrays of NumPy or torch if they are the same elements of the same memory; None for
    other arrays, and for tensors without memory or elements. The strides of axes of one element do not count.
    """
    if isinstance(array, np.ndarray):
        place, device, strides = array.ctypes.data, None, array.strides
    elif is_torch(array) and str(array.layout) == "torch.strided" and array.numel():
        try:
            place, device, strides = array.data_ptr(), array.device, array.stride()
        except Exception as error:  # a tensor without memory
            raise_if_from_signal(error)
            return None
    else:
        return None
    if 1 in array.shape:
        strides = tuple(step for step, size in zip(strides, array.shape, strict=True) if size > 1)
    return (place, array.dtype, device, array.shape, strides) if place else None


def is_same(array: Array, other: Array) -> bool:
    """Return whether two arrays of NumPy or torch are the same elements of the same memory; no, for other objects."""
    if array is other or 0 in array.shape:
        return tuple(array.shape) == tuple(other.shape)
    memory = memory_of(array)
    return memory is not None and memory == memory_of(other)


def raw_bytes(name: str, array: Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array of any dtype, (nbytes,), in the order of its elements and in this machine's byte
    order. An array that is contiguous on the host is not copied.
    """
    if is_torch(array):
        import torch

        tensor = array.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
        flat: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
        return flat
    values = _as_numpy(name, array)
    if is_masked(array):
        raise AffluxError(f"[layout] {label(name)} is a masked array: give its filled() values")
    if values.dtype.hasobject:
        raise AffluxError(f"[layout] {label(name)} is an array of objects, whose bytes are no values")
    return np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(-1).view(np.uint8)


def in_numpy(array: Array) -> Array:
    """Return the memory of an array on the host as an array of NumPy. The array itself if it is NumPy's, torch's or on
    a GPU, or gives NumPy no memory; and JAX's, which nobody writes to.
    """
    if isinstance(array, np.ndarray) or is_torch(array) or type(array).__module__.startswith("jax"):
        return array
    try:
        if gpu_of(array) is not None:
            return array
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else on_host(array)
    except Exception as error:
        raise_if_from_signal(error)
        return array


def is_cupy(array: Array) -> bool:
    """Return whether the array is a CuPy array, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def gpu_of(array: Array) -> int | None:
    """Return the index of the array's GPU; None if the array is not on a GPU."""
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return None
    try:
        kind, index = array.__dlpack_device__()
        return int(index) if kind in _GPUS else None
    except Exception as error:  # the engine reads it again, and raises an error with the reason
        raise_if_from_signal(error)
        return None


def on_gpu(array: Array) -> bool:
    """Return whether the array is torch's or CuPy's and on a GPU."""
    return (is_torch(array) or is_cupy(array)) and gpu_of(array) is not None


def on_host(vector: Array, *, copy: bool = False) -> npt.NDArray[Any]:
    """Return the array as NumPy reads it, or a copy of it. An array on a GPU is always copied, and so are parts.
    bfloat16, which NumPy lacks, becomes uint16.
    """
    if isinstance(vector, Parts):
        return np.concatenate([on_host(array) for array in vector.arrays])
    if is_torch(vector):
        import torch

        tensor = vector.detach().to("cpu", copy=copy)
        return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    if is_cupy(vector):
        host_array: npt.NDArray[Any] = vector.get()
        return host_array
    return np.array(vector) if copy else np.asarray(vector)


def bring(vector: Array, out: npt.NDArray[Any]) -> None:
    """Copy a vector of torch or CuPy into the host's memory, of the same type, and wait until the copy is complete."""
    if is_torch(vector):
        as_torch(out).copy_(vector.detach())
    else:
        vector.get(out=out)


def private_copy(array: Array) -> Array:
    """Return an array with the same values and dtype to which no other code writes."""
    if is_torch(array):
        return array.clone()
    if is_cupy(array):
        return array.copy()
    # An array with DLPack but without NumPy's buffer protocol is JAX's, and immutable.
    return array if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray) else np.array(array)


def _as_numpy(name: str, array: Array) -> npt.NDArray[Any]:
    try:
        return on_host(array)
    except Exception as error:
        raise_if_from_signal(error)
        raise AffluxError(f"[layout] {label(name)} does not give its memory to NumPy: {error}") from None


def ready(name: str, array: Array) -> Array:
    """Return the array as the engine reads it: C-contiguous and of a dtype in FLOATS. Only an array that is not so
    already is copied.
    """
    kind = kind_of(name, array)
    if is_torch(array):
        tensor = array.detach().resolve_neg()
        return (tensor if kind in FLOATS else tensor.double()).contiguous()
    if is_cupy(array):
        return array.astype(kind if kind in FLOATS else "float64", order="C", copy=False)
    if not isinstance(array, np.ndarray) and kind in FLOATS and hasattr(array, "__dlpack__"):
        return array  # JAX: contiguous, on any device
    # NumPy has no name for bfloat16.
    dtype = "float64" if kind not in FLOATS else None if kind == "bfloat16" else kind
    values = np.asarray(_as_numpy(name, array), dtype, order="C")
    return values if values.flags.aligned else values.copy()


def check_flat(name: str, vector: Any, size: int, *dtypes: type[np.floating[Any]]) -> None:
    """Check a flat vector that a caller passes. Without `dtypes`, the vector must be float32 or float64."""
    dtypes = dtypes or (np.float32, np.float64)
    expected = f"{' or '.join(dtype.__name__ for dtype in dtypes)} of shape ({size},), contiguous"
    if on_gpu(vector):
        kind, shape = kind_of(name, vector), tuple(vector.shape)
        if shape != (size,) or kind not in [dtype.__name__ for dtype in dtypes]:
            raise AffluxError(f"[layout] {name} is {kind} of shape {shape}, expected {expected}")
        return
    if not isinstance(vector, np.ndarray) or is_masked(vector):
        raise AffluxError(f"[layout] {name} is a {type(vector).__name__}, expected a NumPy array of {expected}")
    if vector.shape != (size,) or vector.dtype not in dtypes or not vector.flags.c_contiguous:
        strided = "" if vector.flags.c_contiguous else "strided "
        raise AffluxError(f"[layout] {name} is {strided}{vector.dtype} of shape {vector.shape}, expected {expected}")


def readable_copy(array: Array) -> Array | None:
    """Return a copy of a flat vector that the engine cannot read as it is: strided, unaligned or byte-swapped, or with
    torch's negative bit; None for any other object.
    """
    if isinstance(array, np.ndarray):
        flags, native = array.flags, array.dtype.isnative
        if is_masked(array) or (flags.c_contiguous and flags.aligned and native):
            return None
    elif not is_torch(array) or (array.is_contiguous() and not array.is_neg()):
        return None
    return ready("the vector", array) if type_of("the vector", array) in FLOATS else None


def fill(out: Array, names: Sequence[str], parts: Sequence[Array]) -> None:
    """Write arrays that are `ready` one after the other into a flat vector, converting to its dtype."""
    if not on_gpu(out):
        parts = [part.cpu() if is_torch(part) else part.get() if is_cupy(part) else part for part in parts]
    try:
        ops.ingest(parts, out)
    except (AffluxError, UnavailableError) as error:
        raise type(error)(f"[layout] {with_names(error, names)}") from None


def with_names(error: Exception, names: Sequence[str]) -> str:
    """Return the text of an error about one of many parts, with the part's name in the place of its number."""
    return re.sub(r"\bupdate\[(\d+)\]", lambda match: label(names[int(match[1])]), str(error))


def require_writable(name: str, array: Array, shape: tuple[int, ...] | None = None) -> None:
    """Check that `put` may write values into the array, of this shape if it is given.

    Raises:
        AffluxError: the array has another shape, or cannot be written.
    """
    if shape is not None:
        check_shape(name, array, shape)
    if not is_torch(array) and not isinstance(array, np.ndarray) and not is_cupy(array):
        raise AffluxError(
            f"[layout] {label(name)} is a {type(array).__name__}, expected a NumPy array or torch tensor to write to; "
            "where arrays cannot be written, as JAX's, Layout.views gives new ones"
        )
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise AffluxError(f"[layout] {label(name)} is read-only")
    strides = array.stride() if is_torch(array) else array.strides
    if 0 not in array.shape and any(step == 0 and size > 1 for step, size in zip(strides, array.shape, strict=True)):
        raise AffluxError(f"[layout] {label(name)} is expanded: several elements share their memory")
    if is_torch(array) and array.numel():
        storage = array.untyped_storage()
        if storage.data_ptr() + storage.nbytes() < _span(array)[1]:
            problem = f"{label(name)} has a storage of {storage.nbytes()} bytes, which ends before the tensor does"
            raise AffluxError(f"[layout] {problem}")


def require_apart(targets: Iterable[tuple[str, Array]]) -> list[tuple[int, int]]:
    """Return the addresses at which the bytes of arrays, given with their names, begin and end.

    Raises:
        AffluxError: two arrays share an element of their memory.
    """
    spans = [(*_span(array), name, array) for name, array in targets if 0 not in array.shape]
    spans.sort(key=itemgetter(0))
    for i, (_, end, name, array) in enumerate(spans):
        for begin, _, other, other_array in islice(spans, i + 1, None):
            if begin >= end:
                break
            if np.shares_memory(_memory(array), _memory(other_array)):
                names = f"{label(name)} and {label(other)}"
                raise AffluxError(f"[layout] {names} share memory, and both are written: give one its own memory")
    return [span[:2] for span in spans]


def may_overlap(vector: Array, spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether the memory of a vector, if it is NumPy's, has one of these addresses."""
    if not isinstance(vector, np.ndarray) or not vector.size:
        return False
    first, last = _span(vector)
    return any(begin < last and first < end for begin, end in spans)


def _span(array: Array) -> tuple[int, int]:
    """Return the addresses at which the bytes of an array with elements begin and end."""
    if not is_torch(array):
        return np.lib.array_utils.byte_bounds(_memory(array))
    begin, last = array.data_ptr(), array.numel() - 1
    if not array.is_contiguous():
        last = sum([step * (size - 1) for step, size in zip(array.stride(), array.shape, strict=True)])
    return begin, begin + (last + 1) * array.element_size()


def _memory(array: Array) -> npt.NDArray[Any]:
    """Return an array of NumPy in the place of this one, on any device. Its elements must not be read."""
    if isinstance(array, np.ndarray):
        return array
    size = array.element_size() if is_torch(array) else array.itemsize
    place = array.data_ptr() if is_torch(array) else array.data.ptr
    strides = tuple(stride * size for stride in array.stride()) if is_torch(array) else array.strides
    interface = {"version": 3, "data": (place, True), "strides": strides, "typestr": f"|V{size}"}
    return np.asarray(SimpleNamespace(__array_interface__={**interface, "shape": tuple(array.shape)}))


def count_writes(arrays: Iterable[Array]) -> None:
    """Tell autograd that the torch tensors among these arrays, which are `all_own`, were written by other code."""
    tensors = [array for array in arrays if type(array) is not np.ndarray]
    if not tensors:
        return
    from torch.autograd.graph import increment_version

    try:
        increment_version(tensors)
    except (RuntimeError, TypeError):  # an older torch, which takes one tensor
        for tensor in tensors:
            increment_version(tensor)


def prepare(name: str, array: Array, values: Array, *, integers: bool = True) -> Array:
    """Return the values that `put` may write into `array`: `values`, rounded half to even for integers.

    Raises:
        AffluxError: the array cannot be written, or its integers cannot hold the values; or it is one of integers, and
            not `integers`.
    """
    kind = kind_of(name, array)
    require_writable(name, array, tuple(values.shape))
    if kind in FLOATS:
        return values
    if not integers:
        raise AffluxError(f"[layout] {label(name)} is {kind}, to which the model's floats would be rounded")
    low, high = (0, 1) if kind == "bool" else (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    values = np.asarray(np.rint(on_host(values)))
    # high + 1 is a power of two, hence exact; a NaN fails both comparisons.
    bad = ~((values >= float(low)) & (values < float(high + 1)))
    if bad.any():
        raise AffluxError(f"[layout] {label(name)} is {kind}, which cannot hold {values[bad][0]}")
    return values


def put(array: Array, values: Array) -> None:
    """Write `values` of any dtype into an array that `require_writable` has checked, converting to the array's dtype.
    Floats for integers must be the result of `prepare`.
    """
    if is_torch(array):
        # Not through NumPy: autograd must detect that the tensor has changed.
        import torch

        with torch.inference_mode() if array.is_inference() else nullcontext():
            array.detach().copy_(as_torch(values))
        if is_cupy(values):  # CuPy may reuse this memory, on a stream that does not wait for torch's
            torch.cuda.current_stream(gpu_of(values)).synchronize()
        return
    if is_cupy(array):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(gpu_of(array)):
            array[...] = cupy.asarray(values if is_cupy(values) else on_host(values))
        return
    host_values = on_host(values)
    # A value beyond the range becomes infinite, as in torch; the engine detects it in its own sweep.
    with np.errstate(over="ignore"):
        # By way of float32, as in torch and in the engine; values of one dtype keep their bits.
        if type_of("", array) in ("float16", "bfloat16") and host_values.dtype != array.dtype:
            host_values = host_values.astype(np.float32, copy=False)
        np.copyto(array, host_values, casting="unsafe")


def as_torch(array: Array) -> "torch.Tensor":
    """Return a tensor of the array's memory; a copy if the memory is read-only and the library does not support that.

    torch.from_numpy would warn about read-only memory.
    """
    import torch

    if is_torch(array):
        return array
    try:
        return torch.utils.dlpack.from_dlpack(array)
    except BufferError:  # NumPy or torch too old for read-only memory
        return torch.tensor(array)


def immutable_copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy whose memory is a bytes object, so that NumPy refuses to make it writable again."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def frozen(values: npt.ArrayLike, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a read-only copy, in C order."""
    array = np.array(values, dtype, order="C")
    array.setflags(write=False)
    return array


def first_beyond(vector: Array, most: float) -> int | None:
    """Return the index of the first element that is NaN or has a magnitude beyond `most`; None if there is none."""
    values = widened(on_host(vector))
    good = np.abs(values) <= np.float64(most)  # float64, because float32 may not hold `most`
    return None if good.all() else int(np.argmin(good))


#: The least magnitudes that are rounded to infinity; float64 is rounded to float32 before it is rounded to 16 bits.
_OVERFLOWS = {"float16": 65520 - 2.0**-9, "bfloat16": 2.0**128 - 2.0**119 - 2.0**103, "float32": 2.0**128 - 2.0**103}


def first_overflow(values: Array, kind: str) -> float | None:
    """Return a finite value of an array that would be infinite in a dtype; None if there is none."""
    least = _OVERFLOWS.get(kind)
    if least is None or 0 in values.shape or type_of("", values) == kind:
        return None
    extremes = float(values.min()), float(values.max())
    if not np.isfinite(extremes).all():
        host_values = on_host(values)
        numbers = host_values[np.isfinite(host_values)]
        extremes = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 0.0)
    return next((value for value in extremes if least <= abs(value)), None)


def rounded_to(dtype: str, value: float) -> float:
    """Return the value as an element of this dtype has it; bfloat16 is possible."""
    return ops.ingest(np.array([value]), Buffer(Pool(1, dtype, 0))).max


def finite(array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which elements are finite. uint16 holds the bits of bfloat16."""
    good: npt.NDArray[np.bool_] = np.isfinite(widened(array))
    return good


def widened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of floats; of uint16, the bits of bfloat16, its values in float32."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array
