"""torch's tensors that say they are on the emulated device (emulated.py), whose memory is the host's; whatever is made
from one is another one, and as there, they do not meet tensors of the host's but to be copied, nor NumPy.
"""

from types import SimpleNamespace

import torch

import fake_cuda
from emulated import OnCuda

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


def moved(array):
    """A copy of NumPy's array on the device."""
    return torch.tensor(array).as_subclass(CudaTensor)


def install():
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.Stream, torch.cuda.stream = fake_cuda.Stream, fake_cuda.stream
