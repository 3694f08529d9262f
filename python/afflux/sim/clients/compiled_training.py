"""A client's step of SGD as one call: gradient, terms of the optimizer and update; native code, or a CUDA graph.

On the CPU the step is traced once for each shape of batches (`make_fx`), compiled by torch's AOTInductor and the C++
compiler of the machine, and called without Python code of the module. Each process compiles for itself: the same
source, compiler and processor give the same code, and so the same bits. These bits differ from those of
`loss.backward()`, because the code adds in another order.

On a GPU the kernels of a step are recorded once for each shape of batches, and launched together from then on. Kernels,
order and bits are those of `loss.backward()`. A batch that is not full has a shape of its own.
"""

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call, grad_and_value
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from afflux.ops.errors import ConfigError
from afflux.ops.validation import raise_if_from_signal, shortened
from afflux.sim.clients.batches import note_once
from afflux.sim.clients.flat_model import FlatModel
from afflux.sim.workload.config import PROXIMAL, SimConfig
from afflux.sim.workload.task import Loss

#: Shapes of full batches for which one run compiles a step.
MOST_SHAPES = 4
#: The most operations of a step, with its gradient. The C++ compiler takes about 10 s for a hundred.
MOST_OPERATIONS = 5_000
#: Compiled steps that a process keeps for its next runs.
MOST_KEPT = 16
#: Steps before the one that is recorded, in which libraries allocate and choose.
WARM_UPS = 2
#: Batches of a shape before its step is recorded, which takes as long as about ten steps.
EAGER_BATCHES = 4
#: Shapes of batches for which one run records a step.
MOST_GRAPHS = 64
INDUCTOR_OPTIONS = {
    "cpp.threads": 1,
    # With these heuristics, pooling is not vectorized: LeNet-5's step takes 1.4 times as long (Zen 5).
    "cpp.enable_tiling_heuristics": False,
    # Channels last takes longer than torch's own order for the few channels of small CNNs.
    "layout_optimization": False,
}

CompiledRun = Callable[[list[torch.Tensor]], list[torch.Tensor]]
#: Makes a step on (x, y) by autograd, and returns the mean loss before it.
EagerStep = Callable[[Any, Any], torch.Tensor]
#: Returns the code for batches like the tensors of one, which are the leaves of a tree (x, y); None: none is of use.
#: The number is that of the shapes of batches before this one.
Compile = Callable[[int, EagerStep, list[torch.Tensor], TreeSpec], CompiledRun | None]
_kept: dict[str, CompiledRun] = {}


def require_compiler() -> None:
    """Raise ConfigError unless torch has AOTInductor, and there is a C++ compiler: CXX, or the system's."""
    import torch._inductor  # as slow as torch itself; only this setting needs it

    if not hasattr(torch._inductor, "aoti_load_package"):
        raise ConfigError(f"compile needs torch 2.6 or newer, and this is {torch.__version__}")
    compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"compile needs a C++ compiler, and there is no {compiler}: install one, or set CXX")


class CompiledStep:
    """One local step of the built-in optimizers, for all clients of a run."""

    def __init__(self, compile_like: Compile, eager_batches: int = 0) -> None:
        """Compile nothing yet: a step is compiled after so many eager batches of each shape."""
        self._compile_like, self._eager_batches = compile_like, eager_batches
        self._runs: dict[Any, CompiledRun | None] = {}
        self._seen: Counter[Any] = Counter()

    def __call__(self, x: Any, y: Any, eager: EagerStep) -> torch.Tensor:
        """Make a step on the model's params; return the mean loss before it.

        Args:
            x: arguments of the module, a tree of tensors.
            y: the labels.
            eager: the same step by autograd.

        Raises:
            ConfigError: the step cannot be compiled.
        """
        leaves, structure = tree_flatten((x, y))
        key = (structure, *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves))
        self._seen[key] += 1
        if self._seen[key] == self._eager_batches + 1:
            self._runs[key] = self._compile_like(len(self._runs), eager, leaves, structure)
        run = self._runs.get(key)
        return eager(x, y) if run is None else run(leaves)[0]


class NativeStep:
    """A step of native code, on the CPU."""

    def __init__(
        self, model: FlatModel, loss: Loss, config: SimConfig, pulled: torch.Tensor, shift: torch.Tensor
    ) -> None:
        """Describe the step.

        Args:
            model: its flat params are changed by each step.
            loss: (output, labels) -> mean loss.
            config: the client optimizer and its learning rate, weight decay and mu.
            pulled: (d,) filled before each training with the params from which the client starts.
            shift: (d,) filled before each training with SCAFFOLD's c - c_i.

        Raises:
            ConfigError: there is no C++ compiler.
        """
        require_compiler()
        self._model, self._loss = model, loss
        self._decayed, self._proximal = bool(config.weight_decay), config.client_optimizer in PROXIMAL
        self._shifted = config.client_optimizer == "scaffold"
        numbers = (config.client_lr, config.weight_decay, config.mu if self._proximal else 0.0)
        # Numbers are arguments of the code, so that a grid of settings compiles once.
        self._fixed = [model.flat, pulled, shift, *(torch.tensor(value, dtype=torch.float32) for value in numbers)]
        trained = {field.name for field in model.layout.fields}
        tensors = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
        self._constant = {name: tensor.detach() for name, tensor in tensors.items() if name not in trained}
        self._fixed += self._constant.values()

    def compile_like(self, shapes: int, eager: EagerStep, leaves: list[torch.Tensor], tree: TreeSpec) -> CompiledRun:
        """See `Compile`."""
        if shapes == MOST_SHAPES:
            raise ConfigError(f"full batches have more than {MOST_SHAPES} shapes: too many to compile")
        inputs = [*self._fixed, *leaves]
        try:
            run = _compiled(self._trace(inputs, tree), inputs)
        except ConfigError:
            raise
        except Exception as error:
            text = shortened(f"{type(error).__name__}: {error}")
            raise ConfigError(f"the clients' step cannot be compiled: {text}") from error
        return lambda leaves: run([*self._fixed, *leaves])

    def _trace(self, inputs: Sequence[torch.Tensor], structure: TreeSpec) -> torch.fx.GraphModule:
        """Return the graph of a step; raise ConfigError if it changes the module's buffers."""
        from torch.fx.experimental.proxy_tensor import make_fx  # slow; only this setting needs it

        copies = [tensor.clone() for tensor in inputs]
        first = len(copies) - len(self._constant) - structure.num_leaves
        constant = copies[first : len(copies) - structure.num_leaves]
        before = [tensor.clone() for tensor in constant]
        with torch.random.fork_rng(devices=()):
            graph = make_fx(lambda *tensors: self._step(structure, *tensors))(*copies)
        for name, old, new in zip(self._constant, before, constant, strict=True):
            if not torch.equal(old, new):
                raise ConfigError(f"buffer {name} changes in training, which compile does not support")
        operations = sum(node.op == "call_function" for node in graph.graph.nodes)
        if operations > MOST_OPERATIONS:
            raise ConfigError(f"a step has {operations} operations, too many to compile: at most {MOST_OPERATIONS}")
        return graph

    def _step(self, structure: TreeSpec, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        flat, pulled, shift, rate, weight_decay, mu, *others = tensors
        constant = dict(zip(self._constant, others, strict=False))
        x, y = tree_unflatten(others[len(constant) :], structure)
        arguments: tuple[Any, Any] = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})

        # `constant` is an argument, because torch.func lets a function change only its arguments in place.
        def mean_loss(params: dict[str, torch.Tensor], constant: dict[str, torch.Tensor]) -> torch.Tensor:
            output = functional_call(self._model.module, (params, constant), *arguments)
            return self._loss(output, y)  # type: ignore[no-any-return]

        fields = self._model.layout.fields
        params = {field.name: flat[field.start : field.stop].view(field.shape) for field in fields}
        gradients, loss = grad_and_value(mean_loss)(params, constant)
        parts = []
        for field in fields:
            own = slice(field.start, field.stop)
            gradient = gradients[field.name].reshape(-1)
            if self._decayed:
                gradient = gradient + weight_decay * flat[own]
            if self._proximal:
                gradient = gradient + mu * (flat[own] - pulled[own])
            if self._shifted:
                gradient = gradient + shift[own]
            parts.append(flat[own] - rate * gradient)
        flat.copy_(torch.cat(parts))
        return (loss,)


class GraphedStep:
    """A step whose kernels on a GPU are recorded in a CUDA graph, and launched together."""

    def __init__(self, model: FlatModel, required: bool) -> None:
        """Record nothing yet.

        Args:
            model: its flat params and buffers are changed by each step.
            required: whether a step that cannot be recorded, or whose graph gives other bits when it is recorded, is an
                error. If not, it is made by autograd.
        """
        self._model, self._required, self._most = model, required, MOST_GRAPHS
        self._pool: Any = None  # the memory of all graphs, because only one runs at a time

    def compile_like(
        self, shapes: int, eager: EagerStep, leaves: list[torch.Tensor], tree: TreeSpec
    ) -> CompiledRun | None:
        """See `Compile`. The terms of `eager` must be in the same memory each time.

        Raises:
            ConfigError: a step that is required cannot be recorded.
        """
        model, inputs = self._model, [leaf.clone() for leaf in leaves]
        x, y = tree_unflatten(inputs, tree)
        changed = [model.flat, *model.module.buffers()]

        def state(*losses: torch.Tensor) -> list[torch.Tensor]:
            return [torch.cuda.get_rng_state(model.device), *(tensor.clone() for tensor in (*changed, *losses))]

        def restore() -> None:
            torch.cuda.set_rng_state(before[0], model.device)
            for tensor, values in zip(changed, before[1:], strict=True):
                tensor.copy_(values)

        if shapes >= self._most:
            return None
        before = state()
        expected = state(eager(x, y))
        restore()
        cause = None
        try:
            if any(now is not then for now, then in zip(model.module.buffers(), changed[1:], strict=True)):
                raise ConfigError("a step replaces a buffer of the module, which a graph would not see")
            replay = self.record(lambda: eager(x, y))
            restore()
            problem = "" if all(map(same_bits, state(replay()), expected)) else "it gives other bits"
        except Exception as error:
            raise_if_from_signal(error)
            problem, cause = shortened(f"{type(error).__name__}: {error}"), error
        restore()
        if problem and self._required:
            raise ConfigError(f"the clients' step cannot be a CUDA graph: {problem}") from cause
        if problem:
            self._most = 0
            note_once(f"the clients' steps run one kernel at a time, without a CUDA graph: {problem}")
            return None

        def run(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            for tensor, values in zip(inputs, leaves, strict=True):
                tensor.copy_(values)
            return [replay().clone()]

        return run

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return a function that launches the kernels of `step`; its result is the same tensor each time."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._model.device):
            current, stream = torch.cuda.current_stream(), recording_stream(self._model.device)
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UPS):
                        step()
                    with torch.cuda.graph(graph, self._pool, stream):
                        loss = step()
            finally:
                current.wait_stream(stream)
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        return replay


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; NaNs may."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@cache
def recording_stream(device: str) -> torch.cuda.Stream:
    """Return the one stream of a GPU on which steps are recorded; libraries keep memory for each stream."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _compiled(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> CompiledRun:
    """Return the native code of a graph.

    A graph that this process has compiled before is not compiled again.
    """
    constants = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    values = [(one.dtype, one.tolist()) if isinstance(one, torch.Tensor) else str(one) for one in constants]
    key = str([graph.code, values, [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs]])
    if key not in _kept:
        shape = " and ".join(str(tuple(tensor.shape)) for tensor in inputs[-2:])
        print(f"compiling the clients' step for batches {shape} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        run = _native(graph, inputs)
        print(f"compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        if len(_kept) == MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = run
    return _kept[key]


def _native(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> CompiledRun:
    copies = tuple(tensor.clone() for tensor in inputs)
    with tempfile.TemporaryDirectory(prefix="afflux-compiled-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(graph, copies)
        path = str(Path(folder) / "step.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=INDUCTOR_OPTIONS)
        # The loader has its own copy of the code, so that the folder can be deleted.
        return torch._inductor.aoti_load_package(path).loader.run
