"""The layout of a model's arrays in one flat vector. Buffers, such as BatchNorm statistics, form a second vector."""

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.arrays import interop, trees
from afflux.arrays.interop import Array
from afflux.arrays.matching import Found, Matcher, listed
from afflux.arrays.selection import Select, selected
from afflux.ops.errors import AffluxError
from afflux.ops.validation import MOST_ELEMENTS, Dtype, as_text, brief, one_dtype_of, reads

Float64 = npt.NDArray[np.float64]
#: A flat vector of parameters: NumPy's float32 or float64, or torch's or CuPy's on a GPU.
Flat = Any

#: A torch module, or any nesting of mappings and sequences that ends in modules and arrays, or a single array.
Tree = Any

_PARAMS_DTYPE = one_dtype_of("float32", "float64")
#: The names of buffers in torch's normalisation layers.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


@dataclass(frozen=True, slots=True)
class Field:
    """The place of one array in its flat vector: that of the parameters, or that of the buffers."""

    name: str  #: dotted path, as "encoder.0.weight"; empty if the tree is a single array
    shape: tuple[int, ...]
    start: int
    dtype: str | None = None  #: of a buffer, so that a counter becomes an integer again; None for parameters

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and places of a model's arrays. One flat vector has the parameters, another one the buffers,
    without gaps.

    The arrays may be NumPy's, torch's, JAX's or any with a `shape` and the buffer protocol or DLPack, of float16,
    bfloat16, float32, float64, integers or bools. They have the order of the tree. A tree that is passed later is
    matched by name, so a mapping may be in any order, and a module, its state_dict and a nested dict with the same
    dotted names are the same to a layout.

    Every method checks names and shapes before it writes. If a name or a shape is wrong, the method raises an
    `AffluxError`, "[layout] ...", that names the array, and writes nothing.

    >>> model = {"dense": {"w": np.ones((2, 2)), "b": np.zeros(1)}, "steps": np.array(7)}
    >>> layout = Layout.of(model)
    >>> [field.name for field in layout.fields], [field.name for field in layout.buffers]
    (['dense.w', 'dense.b'], ['steps'])
    >>> flat = layout.flatten(model)
    >>> flat.tolist(), layout.flatten_buffers(model).tolist()
    ([1.0, 1.0, 1.0, 1.0, 0.0], [7.0])
    >>> layout.views(flat)
    {'dense': {'w': array([[1., 1.],
           [1., 1.]], dtype=float32), 'b': array([0.], dtype=float32)}}
    """

    fields: tuple[Field, ...]  #: the parameters, in the order of their flat vector (size,), float32 or float64
    buffers: tuple[Field, ...]  #: the rest, in the order of a flat vector (buffers_size,), float64 for exact counters
    nesting: trees.Node  #: how `views` nests
    partial: bool = False  #: made with `select`: arrays of a tree under other names are ignored
    #: further names of some of these arrays in a module's state_dict. They are ignored, and not compared
    tied: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    _parameter_matcher: Matcher = dataclasses.field(init=False, repr=False, compare=False)
    _buffer_matcher: Matcher = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parameter_matcher", self._matcher_of(self.fields))
        object.__setattr__(self, "_buffer_matcher", self._matcher_of(self.buffers))

    @classmethod
    def of(cls, tree: Tree, select: Select | None = None, *, buffers: Collection[str] | None = None) -> "Layout":
        """Return the layout of a tree, or of a part of it.

        Args:
            tree: the model. Tied parameters of a torch module count once, under their first name; its non-persistent
                buffers do not count. A state_dict that is passed later may hold tied ones under all of their names.
            select: the arrays that the layout holds; None: all. Trees that are passed later need only these; the other
                arrays of a tree are ignored. So whole models can be pushed, and `load` writes only the selected arrays.
                "trainable" selects the torch tensors that require grad, such as LoRA's adapters or an unfrozen head. It
                also selects the buffers of every module that directly holds such a tensor: the statistics of a
                BatchNorm whose weight is trained, but not those of a frozen one. It selects all arrays of other
                libraries. A collection of dotted names selects the parameters and buffers of these names. A function
                (name, array) -> bool is called for every parameter and buffer, and selects those for which it returns
                True.
            buffers: the names of all arrays that are buffers. By default they are the buffers that a torch module
                registers. In other trees they are integers and bools, arrays whose last name is running_mean,
                running_var or num_batches_tracked, and all arrays under a key "batch_stats".

        Raises:
            AffluxError: an element of the tree is not an array, two arrays have one name, a dtype is not listed above,
                `select` or `buffers` has an unknown name, or no parameter is selected.

        Cost: no array is read.

        >>> Layout.of([np.ones(3), np.ones(2)], buffers=["1"]).size
        3
        >>> model = {"body": {"w": np.ones(5)}, "head": {"w": np.ones(2)}}
        >>> head = Layout.of(model, select=["head.w"])
        >>> head.flatten(model).tolist()
        [1.0, 1.0]
        """
        walk = _walked(tree)
        chosen = _buffers_of(walk) if buffers is None else _named(buffers, walk.leaves)
        kept = walk.leaves.keys() if select is None else selected(walk.leaves, chosen, select)
        placed = _fields_of(walk, kept, chosen)
        nesting = walk.node if select is None else trees.pruned(walk.node, kept)
        return cls(placed[False], placed[True], nesting, select is not None, _tied(walk) if select is None else ())

    @property
    def size(self) -> int:
        """The number of elements of the flat vector of parameters, d."""
        return self.fields[-1].stop if self.fields else 0

    @property
    def buffers_size(self) -> int:
        """The number of elements of the flat vector of buffers."""
        return self.buffers[-1].stop if self.buffers else 0

    def parts(self, tree: Tree) -> list[Array]:
        """Return the parameters in the layout's order, each C-contiguous and of a type that the engine reads.

        Only arrays that the engine cannot read in place are copied: strided arrays (as in channels_last), unaligned or
        byte-swapped ones, and integers (to float64). torch tensors stay on their device; the engine also reads tensors
        that require grad.

        Args:
            tree: may lack buffers.

        Raises:
            AffluxError: missing or unknown names, other shapes, dtypes that are no real numbers, sparse tensors.

        >>> gradients = {"b": np.ones(1), "w": np.ones((2, 2))}
        >>> w, b = Layout.of({"w": np.ones((2, 2)), "b": np.ones(1)}).parts(gradients)
        >>> w is gradients["w"] and b is gradients["b"]
        True
        """
        return self._parameter_matcher.ready(tree)

    def _found(self, tree: Tree) -> Found | list[Array]:
        """Find the arrays as `parts` does, for `Host.ingest`; see `Matcher.found`."""
        return self._parameter_matcher.found(tree)

    def arrays(self, tree: Tree) -> dict[str, Array]:
        """Return the arrays of a tree by name: parameters, then buffers. The tree must hold all arrays of the layout.

        Raises:
            AffluxError: missing or unknown names, other shapes.
        """
        matchers = (self._parameter_matcher, self._buffer_matcher)
        return {name: array for each in matchers for name, array in zip(each.names, each.find(tree), strict=True)}

    def buffer_parts(self, tree: Tree) -> list[Array]:
        """Return the buffers in the layout's order, like `parts`. The tree may lack parameters."""
        return self._buffer_matcher.ready(tree)

    @reads("[layout] tree or out")
    def flatten(self, tree: Tree, out: Flat | None = None, dtype: Dtype = "float32") -> Flat:
        """Copy the parameters into one flat vector (size,): `out`, or a new one of `dtype`, float32 or float64.

        A new vector is NumPy's, on whatever device the tree is. `out` may be on a GPU, if all arrays of the tree are on
        the same GPU. A value beyond the range of float32 becomes infinite, and a server refuses it.

        Raises:
            AffluxError: as `parts`; or `out` or `dtype` is wrong. Nothing is written.

        Cost: one copy; two copies of the arrays that `parts` must copy.
        """
        if out is None:
            out = np.empty(self.size, _PARAMS_DTYPE("layout", "dtype", dtype))
        _check("out", out, self.size)
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise AffluxError("[layout] out is read-only")
        interop.fill(out, self._parameter_matcher.names, self.parts(tree))
        return out

    @reads("[layout] tree")
    def flatten_buffers(self, tree: Tree) -> Float64:
        """Copy the buffers into one flat float64 vector (buffers_size,); counters are exact up to 2**53."""
        out = np.empty(self.buffers_size, np.float64)
        interop.fill(out, self._buffer_matcher.names, self.buffer_parts(tree))
        return out

    @reads("[layout] flat or buffers")
    def views(self, flat: Flat, buffers: Float64 | None = None) -> Tree:
        """Return a tree of views into `flat`, nested as the original tree. Nothing is copied.

        A module becomes a dict by dotted name, any mapping a dict, a named tuple a tuple. The place of a buffer holds a
        view into the vector `buffers`. Without `buffers`, a dict has no key there, and a sequence holds None.
        """
        _check("flat", flat, self.size)
        views = _pieces(self.fields, flat)
        if buffers is not None:
            _check("buffers", buffers, self.buffers_size, np.float64)
            views = chain(views, _pieces(self.buffers, buffers))
        return trees.build(self.nesting, {field.name: view for field, view in views})

    @reads("[layout] target, flat or buffers")
    def load(self, target: Tree, flat: Flat, buffers: Float64 | None = None) -> None:
        """Copy `flat` and `buffers` into a torch module or a tree of writable NumPy or CuPy arrays and torch tensors.

        Values are converted to each array's dtype and device; for integers they are rounded half to even.

        Args:
            target: overwritten; may lack buffers if none are given.
            flat: (size,) float32 or float64; NumPy's, or torch's or CuPy's on a GPU.
            buffers: (buffers_size,) float64. None leaves the target's buffers unchanged.

        Raises:
            AffluxError: missing or unknown names, other shapes, arrays that cannot be written (read-only, JAX's), a
                value that an integer cannot hold; nothing is written.

        Cost: one copy.

        >>> target = [np.zeros(2), np.array(0)]
        >>> Layout.of(target).load(target, np.ones(2, np.float32), np.array([2.5]))
        >>> target
        [array([1., 1.]), array(2)]
        """
        _check("flat", flat, self.size)
        pieces = list(_pieces(self.fields, flat))
        if buffers is not None:
            _check("buffers", buffers, self.buffers_size, np.float64)
            pieces += _pieces(self.buffers, buffers)
        matcher = self._parameter_matcher if buffers is None else self._matcher_of(field for field, _ in pieces)
        writes = [
            (array, interop.prepare(field.name, array, values))
            for array, (field, values) in zip(matcher.find(target), pieces, strict=True)
        ]
        for array, values in writes:
            interop.put(array, values)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain dicts and lists, for a checkpoint.

        >>> Layout.of({"w": np.ones((2, 3)), "n": np.array(1)}).to_json()  # doctest: +NORMALIZE_WHITESPACE
        {'fields': [['w', [2, 3]]], 'buffers': [['n', [], 'int64']], 'nesting': {'dict': [['w', 'w'], ['n', 'n']]},
        'partial': False, 'tied': []}
        """
        return {
            "fields": [[field.name, list(field.shape)] for field in self.fields],
            "buffers": [[field.name, list(field.shape), field.dtype] for field in self.buffers],
            "nesting": trees.to_json(self.nesting),
            "partial": self.partial,
            "tied": list(self.tied),
        }

    @classmethod
    def from_json(cls, data: Any) -> "Layout":
        """Return the layout that `to_json` has converted. Raises AffluxError if `data` is not a layout."""
        try:
            fields = _placed((*field, None) for field in data["fields"])
            buffers = _placed(data["buffers"])
            nesting = trees.from_json(data["nesting"])
            partial, tied = data["partial"], data.get("tied", [])
            named = [field.name for field in (*fields, *buffers)]
            sound = (
                all(type(n) is int and n >= 0 for field in (*fields, *buffers) for n in field.shape)
                and all(field.dtype in interop.REAL for field in buffers)
                and len(set(named)) == len(named)
                and sorted(named) == sorted(trees.names(nesting))
                and type(partial) is bool
                and type(tied) is list
                and all(type(name) is str and name not in named for name in tied)
            )
        except Exception as error:  # the data may be anything
            raise AffluxError(f"[layout] the data describes no layout: {brief(error)}") from None
        if not sound:
            raise AffluxError("[layout] the data describes no layout: a shape, dtype or name is wrong")
        return cls(fields, buffers, nesting, partial, tuple(tied))

    def _matcher_of(self, fields: Iterable[Field]) -> Matcher:
        fields, known = tuple(fields), [field.name for field in chain(self.fields, self.buffers)]
        names, shapes = [field.name for field in fields], [field.shape for field in fields]
        return Matcher(names, shapes, known, self.tied, partial=self.partial)


@reads("[layout] tree")
def _walked(tree: Tree) -> trees.Walk:
    return trees.Walk(tree)


@reads("[layout] tree")
def _tied(walk: trees.Walk) -> tuple[str, ...]:
    return walk.tied()


@reads("[layout] tree")
def _buffers_of(walk: trees.Walk) -> Collection[str]:
    return {name for name, array in walk.leaves.items() if _is_buffer(walk, name, array)}


@reads("[layout] buffers")
def _named(buffers: Collection[str], leaves: Collection[str]) -> Collection[str]:
    """Return the names of the buffers. Raises AffluxError if one is not the name of an array of the tree."""
    names = [buffers] if isinstance(buffers, str) else list(buffers)
    found = {text for text in map(as_text, names) if text is not None and text in leaves}
    unknown = [as_text(name) or brief(name) for name in names if as_text(name) not in found]
    if unknown or isinstance(buffers, str):
        raise AffluxError(f"[layout] buffers must be names of the tree's arrays, not {listed(unknown or names)}")
    return found


@reads("[layout] tree")
def _fields_of(walk: trees.Walk, kept: Collection[str], buffers: Collection[str]) -> list[tuple[Field, ...]]:
    """Return the fields of the parameters in `kept`, then those of the buffers in `kept`."""
    placed: tuple[list[tuple[str, Any, str | None]], ...] = ([], [])
    for name, array in walk.leaves.items():
        if name in kept:
            kind, shape, is_buffer = interop.kind_of(name, array), tuple(map(int, array.shape)), name in buffers
            if any(n < 0 for n in shape) or prod(shape) > MOST_ELEMENTS:
                raise AffluxError(f"[layout] {interop.label(name)} has shape {shape}, which is not a valid shape")
            placed[is_buffer].append((name, shape, kind if is_buffer else None))
    return [_placed(some) for some in placed]


def _placed(arrays: Iterable[tuple[str, Iterable[int], str | None]]) -> tuple[Field, ...]:
    """Return the fields of arrays that lie one after the other in their vector."""
    fields = []
    start = 0
    for name, shape, dtype in arrays:
        fields.append(Field(name, tuple(shape), start, dtype))
        start = fields[-1].stop
    return tuple(fields)


def _pieces(fields: Iterable[Field], vector: Flat) -> Iterable[tuple[Field, Flat]]:
    return ((field, vector[field.start : field.stop].reshape(field.shape)) for field in fields)


def _check(name: str, vector: Any, size: int, *dtypes: type[np.floating[Any]]) -> None:
    """Check a flat vector that a caller passes. Without `dtypes`, the vector must be float32 or float64."""
    dtypes = dtypes or (np.float32, np.float64)
    expected = f"{' or '.join(dtype.__name__ for dtype in dtypes)} of shape ({size},), contiguous"
    if interop.on_gpu(vector):
        kind, shape = interop.kind_of(name, vector), tuple(vector.shape)
        if shape != (size,) or kind not in [dtype.__name__ for dtype in dtypes]:
            raise AffluxError(f"[layout] {name} is {kind} of shape {shape}, expected {expected}")
        return
    if not isinstance(vector, np.ndarray) or interop.is_masked(vector):
        raise AffluxError(f"[layout] {name} is a {type(vector).__name__}, expected a NumPy array of {expected}")
    if vector.shape != (size,) or vector.dtype not in dtypes or not vector.flags.c_contiguous:
        strided = "" if vector.flags.c_contiguous else "strided "
        raise AffluxError(f"[layout] {name} is {strided}{vector.dtype} of shape {vector.shape}, expected {expected}")


def _is_buffer(walk: trees.Walk, name: str, array: Array) -> bool:
    """Return whether the array is a buffer: as its module declares it, or without a module by its name and dtype."""
    if name in walk.declared:
        return walk.declared[name]
    path = name.split(".")
    is_float = interop.type_of(name, array) in interop.FLOATS
    return not is_float or path[-1] in _STATISTICS or "batch_stats" in path
