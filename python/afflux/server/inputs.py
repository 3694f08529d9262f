"""The conversion of a caller's arrays to flat vectors, and back. Messages name the client and the array."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import inf, sqrt
from sys import float_info
from typing import Any

import numpy as np

from afflux import ops
from afflux._engine import ArrayTable, RowCheck, all_own, ingest, shared_memory
from afflux.aggregation.limits import Limits
from afflux.aggregation.local_plane import LocalPlane, plane_like
from afflux.aggregation.plane import DataPlane, Draft, Slot, Vector
from afflux.aggregation.reports import Pulled
from afflux.aggregation.streaming import MOST_SQUARES
from afflux.arrays.constants import Constants, np_dtype
from afflux.arrays.fields import Field, Places, Write, check_copied, from_words, write_all
from afflux.arrays.interop import (
    as_held,
    first_beyond,
    immutable_copy,
    in_numpy,
    is_masked,
    on_host,
    readable_copy,
    require_memory,
    with_names,
)
from afflux.arrays.layout import Layout, Tree
from afflux.arrays.libraries import children, is_keras, rebuilder
from afflux.arrays.likeness import Like
from afflux.arrays.matching import with_local
from afflux.arrays.modules import QUANTISED, has_attribute, is_module, is_quantised, is_state_dict
from afflux.ops.errors import AffluxError, PlaneError, StoreError, UnavailableError
from afflux.ops.validation import MOST_ELEMENTS, as_text, brief, raise_if_from_signal, reads, unreadable
from afflux.rules.rule import Float64, Kind, Rule

#: A kind with its article, for messages.
A_KIND = {"update": "an update", "gradient": "a gradient", "model": "a model"}


#: Names of arrays, and the arrays, which a caller has passed.
Memory = tuple[tuple[str, ...], list[ops.Array]]
NO_MEMORY: Memory = (), []
NAME_OF_VECTOR = ("the vector",)


@cache
def _flat_places(size: int) -> Places:
    """Return the place of a flat vector, which messages call it."""
    return Places([Field("it", (size,), 0)])


@dataclass(frozen=True, slots=True)
class InputAdapter:
    """The conversion between one server's flat vectors and the vectors and trees of its callers."""

    kind: Kind
    layout: Layout | None  #: the layout, for servers that were made with a tree
    size: int  #: d
    num_threads: int
    plane: DataPlane  #: the server's vectors
    likes: Mapping[str, Like] = field(default_factory=dict)  #: for each array of the first params, by name
    constants: Constants = field(default_factory=Constants)  #: the values of constants and local arrays
    #: makes an object like the first params from arrays by name; None: trees go out as dicts and lists
    rebuild: Callable[[Mapping[str, Any]], Any] | None = None

    @classmethod
    @reads("[Server] params")
    def of(
        cls,
        params: "ops.Array | Tree",
        kind: Kind,
        num_threads: int,
        layout: Layout | None = None,
        most: float = float_info.max,
    ) -> "tuple[InputAdapter, ops.Array | list[ops.Array]]":
        """Return an adapter for vectors like `params`, with a plane on their device; and the parts of params.

        The default of `layout` is the layout of all of params. Buffers with a value beyond `most` are then constants.
        """
        if layout is not None and not (isinstance(layout, Layout) and is_tree(params)):
            raise AffluxError(f"[Server] layout is {brief(layout)}, must be the Layout of params, a model's arrays")
        if is_tree(params):
            layout = layout or Layout._of(params, most=most)
            layout._require_parameters("[Server] params", QUANTISED if is_quantised(params) else "")
            constants = layout._constants_of(params)
            rebuild = None if layout.partial else rebuilder(params, layout._first_names)
            intake = cls(kind, layout, layout.size, num_threads, LocalPlane(), constants=constants, rebuild=rebuild)
        else:
            intake = cls(kind, None, length("[Server] params", params), num_threads, LocalPlane())
        parts = intake.parts("[Server] params", params)
        leaves = {"": params} if layout is None else layout.arrays(params)
        likes = {name: Like.of(name, array) for name, array in leaves.items()}
        return replace(intake, plane=plane_like("[Server] params", parts, intake.names), likes=likes), parts

    def moved_to(self, plane: DataPlane) -> "InputAdapter":
        """Return the adapter of a server whose vectors are in another plane."""
        if not isinstance(plane, DataPlane):
            raise AffluxError(f"[Server] plane is {brief(plane)}, must be a DataPlane")
        if self.plane.gpu is not None:
            raise UnavailableError(f"[Server] params is on {self.plane.gpu}, and plane on the CPU")
        return replace(self, plane=plane)

    def parts(
        self, subject: str, vector: "ops.Array | Tree", originals: list[ops.Array] | None = None
    ) -> "ops.Array | list[ops.Array]":
        """Return the array, or the tree's arrays (see Layout.parts), that form the flat vector; `originals` gets the
        tree's own arrays.
        """
        try:
            return self._parts(subject, vector, originals)
        except Exception as error:
            unreadable(subject, error)

    def _parts(
        self, subject: str, vector: "ops.Array | Tree", originals: list[ops.Array] | None
    ) -> "ops.Array | list[ops.Array]":
        if self.layout is not None and is_tree(vector):
            try:
                return self.layout._float_parts(vector, originals)
            except AffluxError as error:
                raise AffluxError(f"{subject}: {error}") from None
        size = length(subject, vector)
        if size != self.size:
            raise AffluxError(f"{subject} has {size} elements, the server's params have {self.size}")
        return vector

    def ingest(
        self,
        subject: str,
        parts: "ops.Array | list[ops.Array]",
        slot: Slot | Vector | Draft,
        conversion: ops.Conversion | None = None,
        beside: RowCheck | None = None,
    ) -> ops.Ingested:
        """Make the sweep from the caller's memory into a slot. `beside` runs in parallel with it."""
        try:
            return self.plane.ingest(parts, slot, self.num_threads, conversion, beside)
        except (PlaneError, StoreError):
            raise
        except (AffluxError, UnavailableError) as error:
            copy = None if isinstance(parts, list) else readable_copy(parts)
            if copy is not None:
                return self.ingest(subject, copy, slot, conversion, beside)
            raise type(error)(f"{subject}: {with_names(error, self.names)}") from None
        except Exception as error:
            if str(error).startswith("[cuda] "):
                raise PlaneError(f"{error}: the server's GPU has failed") from error
            unreadable(subject, error)

    def take_in(
        self,
        subject: str,
        parts: "ops.Array | list[ops.Array]",
        slot: Slot | Vector,
        limits: Limits,
        conversion: ops.Conversion | None = None,
        beside: RowCheck | None = None,
    ) -> tuple[ops.Ingested, float]:
        """Copy a vector into a slot, in one sweep, and check the vector.

        Args:
            subject: describes the vector in messages.
            parts: the result of `parts`.
            slot: (d,), overwritten.
            limits: the limits on the vector's elements and norm, after the conversion.
            conversion: the conversion to the kind of the rule.
            beside: a check that runs in parallel.

        Returns:
            The result of the sweep, and the vector's norm.

        Raises:
            AffluxError: the vector has a value that is not finite, or is beyond a limit.
        """
        facts = self.ingest(subject, parts, slot, conversion, beside)
        bad, squares, low, high = facts
        if bad is not None:
            kind = "" if conversion is None else f" as {A_KIND[conversion.wanted]}"
            raise AffluxError(f"{subject} has a non-finite value{kind} at index {bad}{self.place(bad)}")
        norm = sqrt(squares)
        if not limits.allow(low, high, norm):
            index = self.plane.first_beyond(slot, limits.max_abs)  # None: the norm is too large
            at = "" if index is None else f": at index {index}{self.place(index)}"
            raise AffluxError(f"{subject} has {limits.reason(low, high, norm)}{at}")
        return facts, norm

    def take_in_params(self, subject: str, parts: Any, vector: Vector | Draft, limits: Limits) -> None:
        """Copy params into a vector.

        Raises:
            AffluxError: a value is not finite, or too large.
        """
        facts = self.ingest(subject, parts, vector)
        bad, problem, half = facts.first_nonfinite, "a non-finite value", limits.largest / 2
        if bad is None and max(-facts.min, facts.max) > half:  # the other half is for steps, see `Limits.check_step`
            dtype = "float32" if limits.largest < 1e39 else "float64"
            bad = self.plane.first_beyond(vector, half)
            problem = f"a value beyond {half:.3g}, half of the largest {dtype},"
        if bad is not None:
            hint = "" if self.layout is None else "; Layout.of(params, roles=) declares an array that is no parameter"
            raise AffluxError(f"{subject} has {problem} at index {bad}{self.place(bad)}{hint}")

    def new_params(self, params: "ops.Array | Tree", limits: Limits) -> tuple[Vector, Float64 | None]:
        """Return checked copies of the params of `Server.set_params`, and of their buffers; None: a flat vector."""
        subject, vector = "[set_params] params", self.plane.vector()
        self.take_in_params(subject, self.parts(subject, params), vector, limits)
        return vector, self.buffers("[set_params]", params, None, limits.max_abs) if is_tree(params) else None

    def rule_vector(self, rule: Rule, name: str, vector: "ops.Array | Tree", limits: Limits) -> Vector:
        """Return a checked copy of the vector of `Server.set_rule_vector`."""
        if as_text(name) not in rule.needs.handed_in:
            names = ", ".join(rule.needs.handed_in) or "none"
            subject = f"{brief(name)} is not a vector that is set for {rule.name}"
            raise AffluxError(f"[set_rule_vector] {subject}; known: {names}")
        subject = f"[set_rule_vector] {name}"
        if is_module(vector) or is_state_dict(vector):
            raise AffluxError(f"{subject} is a module or its state_dict, which holds params: set the vector itself")
        new = self.plane.vector()
        own_limits = replace(limits, max_norm=inf)  # max_norm is for clients' vectors
        facts, _ = self.take_in(subject, self.parts(subject, vector), new, own_limits)
        if facts.sum_of_squares > MOST_SQUARES:
            raise overflow(subject, facts, "inner products")
        return new

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays of a tree."""
        return () if self.layout is None else self.layout._parameter_matcher.names

    def plain_arrays(self, dtype: str) -> tuple[ArrayTable | None, ops.Parts | None]:
        """Return what the ledger needs to read arrays itself: the table of those of a tree, None if trees are left to
        Python; and parts without arrays, like those of this dtype that a step reads in place, None if it reads none.
        """
        layout = self.layout
        if layout is None:
            return None, ops.Parts((), np.array([0, self.size]), dtype=dtype)
        if layout.apart or layout.aliases:
            return None, None
        return layout._parameter_matcher.table, ops.Parts((), layout._borders, dtype=dtype)

    def in_place(self, subject: str, parts: Any, conversion: ops.Conversion | None, dtype: str) -> Slot:
        """Return the result of `parts` as a slot of this dtype, for a round that is made at once."""
        borders = np.array([0, self.size]) if self.layout is None else self.layout._borders
        if not isinstance(parts, list):
            copy = readable_copy(parts)
            flat = parts if copy is None else copy
            if not hasattr(flat, "__getitem__"):  # exact in float64
                flat = np.empty(self.size)
                self.ingest(subject, parts, Vector(flat))
            parts = [flat[begin:end] for begin, end in pairwise(borders.tolist())]
        return Slot(ops.Parts(as_held(parts), borders, conversion, dtype))

    def buffers(
        self,
        whose: str,
        model: "ops.Array | Tree | None",
        buffers: "Tree | None",
        most: float = float_info.max,
        delta: "ops.Array | Tree | None" = None,
    ) -> Float64 | None:
        """Return the client's values of the model's buffers, (d_b,); None if the model has none.

        Args:
            whose: describes the push in messages.
            model: the client's model, which holds them if `buffers` is None.
            buffers: a tree that holds them, or a flat vector.
            most: the largest magnitude of a value.
            delta: the client's update or gradient.
        """
        layout = self.layout
        if layout is None:
            return None
        buffers = _holder_of_buffers(layout, model, buffers)
        subject = f"{whose} buffers"
        if layout.constants and buffers is not None and is_tree(buffers):
            try:
                self.constants.check(layout._leaves(buffers))
            except Exception as error:
                raise_if_from_signal(error)
                unreadable(whose, AffluxError(f"{whose} model: {error}") if isinstance(error, AffluxError) else error)
        if not layout.buffers_size:
            return None
        if buffers is None:
            names = [field.name for field in (*layout.buffers, *layout.copied)]
            is_held = delta is not None and is_tree(delta) and not {*names}.isdisjoint(layout._leaves(delta))
            listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise AffluxError(
                f"{whose} push {'has differences in place of' if is_held else 'lacks'} the model's buffers ({listed}), "
                "which are no part of an update or gradient: pass their values as buffers=, in a module or a dict, or "
                "the client's whole model, not flat, as model=; or give them the role local: " + with_local(names)
            )
        return self.flat_buffers(subject, buffers, most)

    def memory(
        self,
        vector: "ops.Array | Tree",
        arrays: list[ops.Array],
        model: "ops.Array | Tree | None",
        buffers: "Tree | None",
    ) -> Memory:
        """Return the caller's arrays of a vector or tree, and its buffers, see `buffers`.

        `arrays` are the tree's own arrays of parameters.
        """
        names, own = self._named(vector, arrays, model, buffers)
        return names, own if all_own(own) else [in_numpy(array) for array in own]

    def _named(
        self,
        vector: "ops.Array | Tree",
        arrays: list[ops.Array],
        model: "ops.Array | Tree | None",
        buffers: "Tree | None",
    ) -> Memory:
        layout = self.layout
        names = self.names
        if layout is None or not is_tree(vector):
            names, arrays = NAME_OF_VECTOR, [vector]
        if layout is None or not layout.buffers_size:
            return names, arrays
        holder = _holder_of_buffers(layout, model, buffers)
        if not is_tree(holder):
            return (*names, "the buffers"), [*arrays, holder]
        for matcher in (layout._buffer_matcher, layout._copied_matcher):
            names, arrays = (*names, *matcher.names), [*arrays, *matcher.located(holder)[0]]
        return names, arrays

    def flat_buffers(self, subject: str, buffers: "Tree", most: float = float_info.max) -> Float64 | None:
        """Return the buffers of a tree, or a copy of a flat vector of them, (d_b,); None if the model has none."""
        layout = self.layout
        if layout is None or not layout.buffers_size:
            return None
        try:
            if is_masked(buffers):
                raise AffluxError("it is a masked array: give its filled() values")
            if is_tree(buffers):
                values = layout.flatten_buffers(buffers)
            else:
                require_memory("it", buffers)
                values = np.asarray(on_host(buffers), np.float64)
            flat = immutable_copy(values)
        except (AffluxError, TypeError, ValueError) as error:
            raise_if_from_signal(error)
            raise AffluxError(f"{subject}: {error}") from None
        except Exception as error:
            unreadable(subject, error)
        if flat.shape != (layout.buffers_size,):
            raise AffluxError(f"{subject} has shape {flat.shape}, expected ({layout.buffers_size},)")
        index = first_beyond(flat[: layout.averaged_size], most)
        if index is not None:
            kind = f"a value beyond {most:g}" if np.isfinite(flat[index]) else "a non-finite value"
            raise AffluxError(f"{subject} has {kind} at index {index}{within(layout.buffers, index)}")
        if layout.copied:
            check_copied(subject, layout.copied, flat)
        return flat

    def place(self, index: int) -> str:
        """Return, for messages, the array of the model that contains an element of the flat vector."""
        return "" if self.layout is None else within(self.layout.fields, index)

    def copy_out(self, op: str, now: Pulled, out: "ops.Array | Tree", *, check: bool = False) -> None:
        """Copy a version into the caller's memory; with `check` only raise the error that this would raise."""
        layout, threads, params = self.layout, self.num_threads, now.params
        try:
            alike = not check and type(out) is type(params) is np.ndarray and out.shape == params.shape
            if alike and out.dtype == params.dtype and out.flags.c_contiguous:  # type: ignore[union-attr]
                ingest(params, out, threads)  # many times as fast as what follows, for short vectors
            elif not is_tree(out):
                if length("out", out) != self.size:
                    raise AffluxError(f"it has {length('out', out)} elements, the server's params have {self.size}")
                write = Write(_flat_places(self.size), params, [out])
                write_all([write], num_threads=threads, check=check, finite=True)
            elif layout is None:
                raise AffluxError("this server was made with a flat vector: pull into one")
            else:
                constants = self.constants if layout.constants else None
                layout._load(out, params, now.buffers, constants, num_threads=threads, check=check, finite=True)
            self.plane.wait()  # because this version's memory may be reused
        except (AffluxError, UnavailableError) as error:
            raise type(error)(f"[{op}] out: {error}") from None
        except Exception as error:
            unreadable(f"[{op}] out", error)

    def copied_tree(self, version: Pulled, *, copy: bool = True) -> Tree:
        """Return a copy of a version, in the form of the server's first params; without `copy` in its own memory."""
        layout, params, buffers = self.layout, version.params, version.buffers
        if layout is None:
            return self._like("", None, params).made_of("", on_host(params, copy=copy))
        arrays = self._copied(layout._parameter_matcher.places, params, copy=copy)
        if buffers is not None:
            arrays |= self._copied(layout._buffer_matcher.places, buffers[: layout.averaged_size])
            for field in layout.copied:
                values = from_words(field, buffers)
                arrays[field.name] = self._like(field.name, field.dtype, values).made_of(field.name, values)
        arrays |= self.constants.items(writable=True)
        return layout._tree(arrays) if self.rebuild is None else self.rebuild(layout._with_aliases(arrays))

    def _copied(self, places: Places, vector: Any, *, copy: bool = True) -> dict[str, ops.Array]:
        """Return arrays with the values of a vector: views of a copy of it if they have its dtype, else new ones."""
        likes = [self._like(field.name, field.dtype, vector) for field in places.fields]
        if all(like.shares(vector) for like in {id(like): like for like in likes}.values()):
            pieces = places.pieces(on_host(vector, copy=copy))
            return {field.name: like.wrapped(values) for like, (field, values) in zip(likes, pieces, strict=True)}
        arrays = [like.empty(shape) for like, shape in zip(likes, places.shapes, strict=True)]
        write_all([Write(places, on_host(vector), arrays)], num_threads=self.num_threads, finite=True)
        triples = zip(places.fields, likes, arrays, strict=True)
        return {each.name: like.finished(array) for each, like, array in triples}

    def _like(self, name: str, dtype: str | None, vector: Any) -> Like:
        return self.likes.get(name) or Like("numpy", np_dtype(dtype or "") or vector.dtype)


def _holder_of_buffers(layout: Layout, model: "ops.Array | Tree | None", buffers: "Tree | None") -> "Tree | None":
    """Return what holds the client's buffers, see `InputAdapter.buffers`."""
    is_bare = layout._parameter_matcher.is_bare
    return model if buffers is None and model is not None and is_tree(model) and not is_bare(model) else buffers


def require_own_memory(op: str, entry: Callable[[int], str], memory: Sequence[Memory]) -> None:
    """Raise AffluxError if arrays of two entries, which `entry` describes, share memory: one has lost its values."""
    shared = shared_memory([arrays for _, arrays in memory])
    if shared is not None:
        i, a, j, b = shared
        name, other = memory[i][0][a], memory[j][0][b]
        names = name if name == other else f"{name} and {other}"
        raise AffluxError(
            f"[{op}] {entry(i)} and {entry(j)} share the memory of {names}, so that both have the values that were "
            "written last: give each a copy (copy.deepcopy, clone())"
        )


def overflow(subject: str, facts: ops.Ingested, which: str) -> AffluxError:
    """Return the error of a vector beyond MOST_SQUARES: `which`, "sums" or "inner products", could overflow."""
    return AffluxError(f"{subject} has norm {facts.norm:.3g}: {which} would overflow")


@reads("[Server] a model")
def is_tree(model: object) -> bool:
    """Return whether a model is a torch module, a mapping or a sequence of arrays, rather than one flat vector."""
    if type(model) is dict or type(model) is list:
        return True
    if is_module(model) or (isinstance(model, Mapping | Sequence) and not isinstance(model, str)):
        return True
    return not has_attribute(model, "shape") and (is_keras(model) or children(model) is not None)


def within(fields: Iterable[Field], index: int) -> str:
    """Return, for messages, the name of the field that contains an index of the flat vector."""
    return next((f" (in {field.name})" for field in fields if field.start <= index < field.stop), "")


def length(subject: str, array: ops.Array) -> int:
    """Return the number of elements of a flat vector of any library."""
    shape = getattr(array, "shape", None) if has_attribute(array, "shape") else None
    if shape is None:
        raise AffluxError(f"{subject} is a {type(array).__name__}, expected an array")
    require_memory(subject, array)
    if len(shape) != 1:
        raise AffluxError(f"{subject} has shape {tuple(shape)}, expected (d,)")
    size = int(shape[0])
    if not 0 <= size <= MOST_ELEMENTS:
        raise AffluxError(f"{subject} has shape {tuple(shape)}, which is not a valid shape")
    return size
