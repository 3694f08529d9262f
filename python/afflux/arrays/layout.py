"""The layout of a model's arrays in one flat vector. Buffers, such as BatchNorm statistics, form a second vector."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.arrays import fields as places
from afflux.arrays import interop, trees
from afflux.arrays.constants import Constants
from afflux.arrays.fields import (
    Alias,
    Field,
    Overwrite,
    Role,
    Write,
    from_words,
    to_words,
    write_all,
    write_of,
)
from afflux.arrays.interop import Array
from afflux.arrays.libraries import is_keras, keras_variables
from afflux.arrays.matching import Matcher
from afflux.arrays.modules import is_module, is_read_by_state_dict
from afflux.arrays.roles import Roles, declared_names, require_averages, roles_of, unknown_statistics
from afflux.arrays.selection import Select, selected
from afflux.ops.errors import AffluxError
from afflux.ops.validation import Dtype, brief, one_dtype_of, reads

Float64 = npt.NDArray[np.float64]
#: A flat vector of parameters: NumPy's float32 or float64, or torch's or CuPy's on a GPU.
Flat = Any

#: A torch module, or any nesting of mappings and sequences that ends in modules and arrays, or a single array.
Tree = Any

_PARAMS_DTYPE = one_dtype_of("float32", "float64")
#: The largest magnitude of a statistic: the default of `ServerOptions.max_abs`.
_MOST = 1e15


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and places of a model's arrays. One flat vector has the parameters, another one the buffers,
    without gaps.

    The arrays may be NumPy's, torch's, JAX's or any with a `shape` and the buffer protocol or DLPack, of float16,
    bfloat16, float32, float64, integers or bools. They have the order of the tree. A tree that is passed later is
    matched by name, so a mapping may be in any order, and a module, its state_dict and a nested dict with the same
    dotted names are the same to a layout. A flat list of the parameters alone, such as `[*module.parameters()]`, is
    matched by position and shape.

    Each array has a role: `roles`, docs/reference/models.md. Names of wrappers, such as DataParallel's `module`, do not
    count where the exact names do not match.

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
    #: the statistics, in the order of a flat vector (buffers_size,), float64 for exact counters
    buffers: tuple[Field, ...]
    #: how trees are nested, with all names that they carry
    nesting: trees.Node = dataclasses.field(compare=False)
    partial: bool = False  #: made with `select`: arrays of a tree under other names are ignored
    #: copied arrays, whose bytes follow the statistics in the vector of buffers, a float64 for each 32 bits
    copied: tuple[Field, ...] = ()
    constants: tuple[Field, ...] = ()  #: arrays in neither vector that never change
    #: arrays in neither vector that each client has for itself
    locals: tuple[Field, ...] = dataclasses.field(default=(), compare=False)
    #: further names of some of these arrays, as of tied weights. Equal copies may be pushed
    aliases: tuple[Alias, ...] = dataclasses.field(default=(), compare=False)
    #: statistics by default whose names are not those of known statistics; none, if the layout is a store's
    unknown_statistics: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    #: the number of elements of the flat vector of parameters, d
    size: int = dataclasses.field(init=False, repr=False, compare=False)
    #: the number of elements of the statistics
    averaged_size: int = dataclasses.field(init=False, repr=False, compare=False)
    #: the number of elements of the flat vector of buffers: of the statistics, and of the copied arrays
    buffers_size: int = dataclasses.field(init=False, repr=False, compare=False)
    #: whether a push needs more than the parameters: it has statistics, copied arrays or constants
    apart: bool = dataclasses.field(init=False, repr=False, compare=False)
    _borders: npt.NDArray[np.int64] = dataclasses.field(init=False, repr=False, compare=False)
    _nesting_of_arrays: trees.Node = dataclasses.field(init=False, repr=False)
    _parameter_matcher: Matcher = dataclasses.field(init=False, repr=False, compare=False)
    _buffer_matcher: Matcher = dataclasses.field(init=False, repr=False, compare=False)
    _copied_matcher: Matcher = dataclasses.field(init=False, repr=False, compare=False)
    _whole_matcher: Matcher = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.fields[-1].stop if self.fields else 0)
        object.__setattr__(self, "_borders", np.array([*(field.start for field in self.fields), self.size], np.int64))
        object.__setattr__(self, "averaged_size", self.buffers[-1].stop if self.buffers else 0)
        object.__setattr__(self, "buffers_size", self.copied[-1].stop if self.copied else self.averaged_size)
        object.__setattr__(self, "apart", bool(self.buffers or self.copied or self.constants))
        arrays = {field.name for field in (*self.fields, *self.buffers, *self.copied, *self.constants)}
        object.__setattr__(self, "_nesting_of_arrays", trees.pruned(self.nesting, arrays))
        object.__setattr__(self, "_parameter_matcher", self._matcher_of(self.fields, in_order=True))
        object.__setattr__(self, "_buffer_matcher", self._matcher_of(self.buffers))
        object.__setattr__(self, "_copied_matcher", self._matcher_of(self.copied))
        object.__setattr__(self, "_whole_matcher", self._matcher_of((*self.fields, *self.buffers, *self.copied)))

    @classmethod
    def of(cls, tree: Tree, select: Select | None = None, *, roles: Roles | None = None) -> "Layout":
        """Return the layout of a tree, or of a part of it.

        Args:
            tree: the model. Tied arrays of a torch module, and torch tensors that share their memory, count once, under
                their first name; the others are aliases. A module's non-persistent buffers do not count.
            select: the arrays that the layout holds; None: all. Trees that are passed later need only these; the other
                arrays of a tree are ignored. So whole models can be pushed, and `load` writes only the selected arrays.
                "trainable" selects the torch tensors that require grad, such as LoRA's adapters or an unfrozen head,
                and all buffers except those of modules whose own parameters are all frozen: the statistics of a
                BatchNorm whose weight is trained, but not those of a frozen one. It selects all arrays of other
                libraries. A collection of dotted names selects the parameters and buffers of these names. A function
                (name, array) -> bool is called for every parameter and buffer, and selects those for which it returns
                True.
            roles: roles by patterns of names, as {"bn.*": "local"}; the first pattern that matches a name counts. See
                `fields.Role` for the roles, and docs/reference/models.md for the defaults.

        Raises:
            AffluxError: an element of the tree is not an array, two arrays have one name, a dtype is not listed above,
                `select` or `roles` has an unknown name, or no parameter is selected.

        Cost: buffers of unknown names are read once; no other array is.

        >>> Layout.of([np.ones(3), np.ones(2)], roles={"1": "statistic"}).size
        3
        >>> model = {"body": {"w": np.ones(5)}, "head": {"w": np.ones(2)}}
        >>> head = Layout.of(model, select=["head.w"])
        >>> head.flatten(model).tolist()
        [1.0, 1.0]
        >>> Layout.of(model, roles={"head.*": "local"}).roles
        {'body.w': 'trained', 'head.w': 'local'}
        """
        return cls._of(tree, select, roles)

    @classmethod
    @reads("[layout] tree")
    def _of(
        cls,
        tree: Tree,
        select: Select | None = None,
        roles: Roles | None = None,
        most: float = _MOST,
    ) -> "Layout":
        """Return the layout as `of`. Buffers with a value beyond `most` are constants."""
        walk = trees.Walk(tree, whole=True)
        of_arrays = roles_of(walk, roles)
        arrays = {name: array for name, array in walk.leaves.items() if of_arrays[name] != "alias"}
        if select is not None:
            aside = {name for name in arrays if of_arrays[name] != "trained"}
            names = selected(arrays, aside, select)
            arrays = {name: array for name, array in arrays.items() if name in names}
        declared = declared_names(walk.leaves, roles)
        require_averages(arrays, of_arrays, declared, most)
        fields, statistics, copied, constants, local_fields = places.fields_of(arrays, of_arrays)
        aliases = tuple(
            Alias(name, first) for name, first in walk.aliases.items() if of_arrays[name] == "alias" and first in arrays
        )
        aliases += tuple(Alias(name, first, False) for name, first in walk.synonyms.items() if first in arrays)
        carried = arrays.keys() | {alias.name for alias in aliases}
        nesting = walk.node if select is None else trees.pruned(walk.node, carried)
        unknown = tuple(unknown_statistics(arrays, of_arrays, declared))
        return cls(fields, statistics, nesting, select is not None, copied, constants, local_fields, aliases, unknown)

    @property
    def roles(self) -> dict[str, Role]:
        """The role of each array by name, further names included."""
        fields = (*self.fields, *self.buffers, *self.copied, *self.constants, *self.locals)
        return {field.name: field.role for field in fields} | dict.fromkeys(self.tied, "alias")

    @property
    def tied(self) -> tuple[str, ...]:
        """The further names of arrays."""
        return tuple(self._first_names)

    @property
    def _first_names(self) -> dict[str, str]:
        """The further names of arrays, and the name of each in the layout."""
        return {alias.name: alias.of for alias in self.aliases if alias.carried}

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

    def _float_parts(self, tree: Tree, originals: list[Array] | None = None) -> list[Array]:
        """Return the parameters as `parts` does; integers and bools raise an error, as in a flat vector. `originals`
        gets the tree's own arrays.
        """
        return self._parameter_matcher.ready(tree, floats=True, originals=originals)

    def arrays(self, tree: Tree) -> dict[str, Array]:
        """Return the arrays of a tree by name: parameters, then buffers. The tree must hold all of these.

        Raises:
            AffluxError: missing or unknown names, other shapes.
        """
        matchers = (self._parameter_matcher, self._buffer_matcher, self._copied_matcher)
        return {name: array for finder in matchers for name, array in zip(finder.names, finder.find(tree), strict=True)}

    def _leaves(self, tree: Tree) -> Mapping[str, Any]:
        """Return the arrays of a tree by name, those that the layout does not have among them."""
        return self._parameter_matcher.leaves(tree)

    @reads("[layout] tree or out")
    def flatten(self, tree: Tree, out: Flat | None = None, dtype: Dtype = "float32") -> Flat:
        """Copy the parameters into one flat vector (size,): `out`, or a new one of `dtype`, float32 or float64.

        A new vector is NumPy's, on whatever device the tree is. `out` may be on a GPU, if all arrays of the tree are on
        the same GPU. A value beyond the range of float32 becomes infinite, and a server rejects it.

        Raises:
            AffluxError: as `parts`; or `out` or `dtype` is wrong. Nothing is written.

        Cost: one copy; two copies of the arrays that `parts` must copy.
        """
        if out is None:
            out = np.empty(self.size, _PARAMS_DTYPE("layout", "dtype", dtype))
        interop.check_flat("out", out, self.size)
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise AffluxError("[layout] out is read-only")
        interop.fill(out, self._parameter_matcher.names, self.parts(tree))
        return out

    @reads("[layout] tree")
    def flatten_buffers(self, tree: Tree) -> Float64:
        """Copy the buffers into one flat float64 vector (buffers_size,); counters are exact up to 2**53.

        The tree may lack parameters.
        """
        out = np.empty(self.buffers_size, np.float64)
        interop.fill(out[: self.averaged_size], self._buffer_matcher.names, self._buffer_matcher.ready(tree))
        if self.copied:
            for field, array in zip(self.copied, self._copied_matcher.find(tree, equal=True), strict=True):
                out[field.start : field.stop] = to_words(field, array)
        return out

    @reads("[layout] flat or buffers")
    def views(self, flat: Flat, buffers: Float64 | None = None, constants: Constants | None = None) -> Tree:
        """Return a tree of views into `flat`, nested as the original tree. Nothing is copied.

        A module becomes a dict by dotted name, any mapping a dict, a named tuple a tuple. The place of a buffer holds a
        view into the vector `buffers`; copied arrays are new ones. Without `buffers`, or without `constants`, a dict
        has no key there, and a sequence holds None.
        """
        views = {field.name: view for field, view in self._pieces_of(flat, buffers)}
        return self._tree({**views, **dict(constants.items() if constants is not None else ())})

    def _tree(self, arrays: dict[str, Any]) -> Tree:
        """Return a tree of these arrays by name, which also has the further names of these."""
        return trees.build(self.nesting, self._with_aliases(arrays))

    def _with_aliases(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return these arrays by name, and by the further names that trees carry."""
        return arrays | {name: arrays[first] for name, first in self._first_names.items() if first in arrays}

    def _pieces_of(self, flat: Flat, buffers: Float64 | None = None) -> list[tuple[Field, Array]]:
        """Return views of the parameters and statistics in two flat vectors, and copied arrays, with their fields."""
        self._check_vectors(flat, buffers)
        pieces = [*self._parameter_matcher.places.pieces(flat)]
        if buffers is not None:
            pieces += self._buffer_matcher.places.pieces(buffers)
            pieces += [(field, from_words(field, buffers)) for field in self.copied]
        return pieces

    def _check_vectors(self, flat: Flat, buffers: Float64 | None) -> None:
        interop.check_flat("flat", flat, self.size)
        if buffers is not None:
            interop.check_flat("buffers", buffers, self.buffers_size, np.float64)

    @reads("[layout] target, flat or buffers")
    def load(
        self, target: Tree, flat: Flat, buffers: Float64 | None = None, constants: Constants | None = None
    ) -> None:
        """Copy `flat` and `buffers` into a torch module or a tree of writable NumPy or CuPy arrays and torch tensors.

        Values are converted to each array's dtype and device. A value beyond the range of a dtype becomes infinite, as
        in torch. Buffers that are integers or bools in the layout are
        rounded half to even for arrays of integers. Further copies of an array in the target are written, too. Local
        arrays do not change.

        Args:
            target: overwritten; may lack buffers if none are given.
            flat: (size,) float32 or float64; NumPy's, or torch's or CuPy's on a GPU.
            buffers: (buffers_size,) float64. None leaves the target's buffers unchanged.
            constants: the values of constants; those of the target that differ are overwritten.

        Raises:
            AffluxError: missing or unknown names, other shapes, arrays that cannot be written (read-only, JAX's),
                integers instead of floats, a value that an integer cannot hold, two arrays that share memory and
                are not tied in the layout; nothing is written.

        Cost: one copy. Contiguous arrays of NumPy, and of torch from 2.10 on, are checked and written by one call of
        the engine, if all are on the host.

        >>> target = [np.zeros(2), np.array(0)]
        >>> Layout.of(target).load(target, np.ones(2, np.float32), np.array([2.5]))
        >>> target
        [array([1., 1.]), array(2)]
        """
        self._load(target, flat, buffers, constants)

    def _load(
        self,
        target: Tree,
        flat: Flat,
        buffers: Float64 | None,
        constants: Constants | None,
        *,
        num_threads: int = 1,
        check: bool = False,
        finite: bool = False,
    ) -> None:
        """Load as `load`, by this number of threads; with `check` only raise the error that this would raise; with
        `finite` raise AffluxError for a finite value that would become infinite.
        """
        self._check_vectors(flat, buffers)
        if is_keras(target):
            variables = keras_variables(target)
            values = {name: np.array(variable) for name, variable in variables.items()}
            self._load(values, flat, buffers, constants, num_threads=num_threads, check=check, finite=finite)
            for name in () if check else values.keys() - {field.name for field in self.locals}:
                variables[name].assign(values[name])
            return
        if is_module(target) and is_read_by_state_dict(target):
            state = dict(target.state_dict())
            self._load(state, flat, buffers, constants, num_threads=num_threads, check=check, finite=finite)
            if not check:
                target.load_state_dict(state)
            return
        write_all(self._writes(target, flat, buffers, constants), num_threads=num_threads, check=check, finite=finite)

    def _writes(
        self, target: Tree, flat: Flat | None, buffers: Float64 | None, constants: Constants | None
    ) -> list[Write | Overwrite]:
        """Return the arrays of a target, with their values, as `write_all` takes them; without `flat` no parameters."""
        matcher = self._parameter_matcher if buffers is None else self._whole_matcher
        if flat is None:
            matcher = self._matcher_of((*self.buffers, *self.copied) if buffers is not None else ())
        arrays, leaves = matcher.located(target)
        writes: list[Write | Overwrite] = []
        begin = 0
        if flat is not None:
            begin = len(self.fields)
            writes.append(Write(self._parameter_matcher.places, flat, arrays[:begin]))
        if buffers is not None:
            end = begin + len(self.buffers)
            writes.append(Write(self._buffer_matcher.places, buffers[: self.averaged_size], arrays[begin:end]))
            copied = zip(self.copied, arrays[end:], strict=True)
            writes += [write_of(field, array, buffers) for field, array in copied]
        if self.aliases or constants is not None:
            leaves = self._leaves(target) if leaves is None else leaves
            places = {name: i for i, name in enumerate(matcher.names)}
            for alias in self.aliases:
                i, copy = places.get(alias.of), leaves.get(alias.name)
                if i is None or copy is None or interop.is_same(copy, arrays[i]):
                    continue
                field = dataclasses.replace(matcher.places.fields[i], name=alias.name)
                writes.append(write_of(field, copy, flat if field.role == "trained" else buffers))
            writes += [] if constants is None else constants.writes(leaves)
        return writes

    def _constants_of(self, tree: Tree) -> Constants:
        """Return copies of the constants and the local arrays of a tree."""
        fields = (*self.constants, *self.locals)
        if not fields:
            return Constants()
        names = {field.name for field in fields} if self.partial else None
        return Constants(fields, trees.Walk(tree, names, whole=True).leaves)

    def _require_parameters(self, subject: str, advice: str) -> None:
        """Raise AffluxError if the layout has no parameter with an element; `subject` names the tree in the message."""
        if not self.size:
            names = ", ".join(f"{name} ({role})" for name, role in [*self.roles.items()][:8])
            raise AffluxError(f"{subject} has no parameter to train, d is 0; it holds {names or 'no array'}{advice}")

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain dicts and lists, for a checkpoint.

        >>> Layout.of({"w": np.ones((2, 3)), "n": np.array(1)}).to_json()  # doctest: +NORMALIZE_WHITESPACE
        {'fields': [['w', [2, 3]]], 'buffers': [['n', [], 'int64']], 'others': [], 'tied': [],
        'nesting': {'dict': [['w', 'w'], ['n', 'n']]}, 'partial': False}
        """
        aside = (*self.copied, *self.constants, *self.locals)
        return {
            "fields": [[field.name, list(field.shape)] for field in self.fields],
            "buffers": [[field.name, list(field.shape), field.dtype] for field in self.buffers],
            "others": [[field.name, list(field.shape), field.dtype, field.role, field.nbytes] for field in aside],
            "tied": [[alias.name, alias.of, alias.carried] for alias in self.aliases],
            "nesting": trees.to_json(self.nesting),
            "partial": self.partial,
        }

    @classmethod
    def from_json(cls, data: Any) -> "Layout":
        """Return the layout that `to_json` has converted. Raises AffluxError if `data` is not a layout."""
        try:
            nesting, partial = trees.from_json(data["nesting"]), data["partial"]
            fields, buffers, copied, apart, aliases = places.from_json(data, trees.names(nesting))
            if type(partial) is not bool:
                raise ValueError("partial is not a bool")
        except Exception as error:  # the data may be anything
            raise AffluxError(f"[layout] the data describes no layout: {brief(error)}") from None
        constants, local = (tuple(field for field in apart if field.role == role) for role in ("constant", "local"))
        return cls(fields, buffers, nesting, partial, copied, constants, local, aliases)

    def _matcher_of(self, fields: Iterable[Field], *, in_order: bool = False) -> Matcher:
        other_fields = (*self.copied, *self.constants, *self.locals)
        names = [field.name for field in chain(self.fields, self.buffers, other_fields)]
        return Matcher(fields, names, self.aliases, partial=self.partial, in_order=in_order)
