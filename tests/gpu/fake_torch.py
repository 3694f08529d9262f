"""torch's tensors that say they are on the emulated device (emulated.py), whose memory is the host's; whatever is made
from one is another one, and as there, they do not meet tensors of the host's but to be copied, nor NumPy.
"""

import ctypes
from types import SimpleNamespace

import torch

import fake_cuda
from emulated import OnCuda, Tensor, new_capsule

#: Where tensors of both places meet, or both may be made from the other.
MEETING = {torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.__getitem__, torch.Tensor.as_subclass}


def flat(arguments):
    for argument in arguments:
        yield from flat(argument) if isinstance(argument, list | tuple) else [argument]


class CudaTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        given = flat([*args, *(kwargs or {}).values()])
        if function not in MEETING and any(type(x) is torch.Tensor and x.ndim > 0 for x in given):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")
        return super().__torch_function__(function, types, args, kwargs or {})

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream, max_version=None):
        if not hasattr(self, "exported"):
            plain = self.detach().as_subclass(torch.Tensor)
            wide = plain.dtype == torch.bfloat16
            array = plain.view(torch.int16).numpy().view("uint16") if wide else plain.numpy()
            self.exported = OnCuda(array, "bfloat16" if wide else array.dtype.name)
        return self.exported.__dlpack__(stream=stream, max_version=max_version)

    def __array__(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def numpy(self, **_):
        if self.dtype != torch.uint8:  # which forbids resizing, where torch says that the memory is the host's
            self.__array__()
        return super().numpy()

    def to(self, *arguments, copy=False, **options):
        if arguments[:1] != ("cpu",):
            return super().to(*arguments, copy=copy, **options)
        return self.detach().as_subclass(torch.Tensor).clone()

    def cpu(self):
        return self.to("cpu")

    def new_empty(self, *shape, device=None, pin_memory=False, **options):
        if device != "cpu":
            return super().new_empty(*shape, **options)
        assert pin_memory
        return torch.empty(*shape, **options)

    def copy_(self, values, non_blocking=False):
        if not non_blocking:
            return super().copy_(values)
        fake_cuda.Stream.current.give(lambda: super(CudaTensor, self).copy_(values))
        return self


CudaTensor.__module__ = "torch"


class Exchange(ctypes.Structure):
    """DLPackExchangeAPI: functions without Python, which here are torch's own, or Python's."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("object_from_managed", ctypes.c_void_p),
        ("tensor_from_object", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)),
        ("current_stream", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)),
    )


def exchange():
    """torch's functions, for which the memory of these tensors is the device's, and the current stream the default."""
    own = Exchange.from_address(pointer_of(torch.Tensor.__dlpack_c_exchange_api__, NAME))

    def tensor_from_object(tensor, out):
        status = own.tensor_from_object(tensor, out)
        Tensor.from_address(out).device_type = 2
        if tensor.numel() == 0:
            Tensor.from_address(out).data = None  # as torch's on a GPU
        return status

    def current_stream(_, device, out):
        ctypes.c_void_p.from_address(out).value = torch.cuda.current_stream(device).cuda_stream
        return 0

    functions = dict(Exchange._fields_)
    return Exchange(
        major=1,
        tensor_from_object=functions["tensor_from_object"](tensor_from_object),
        current_stream=functions["current_stream"](current_stream),
    )


NAME = b"dlpack_exchange_api"
pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):  # since torch 2.10
    EXCHANGE = exchange()
    CudaTensor.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(EXCHANGE), NAME, None)


def moved(array):
    """A copy of NumPy's array on the device."""
    return torch.tensor(array).as_subclass(CudaTensor)


def install():
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.Stream, torch.cuda.stream = fake_cuda.Stream, fake_cuda.stream
