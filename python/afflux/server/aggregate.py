"""`aggregate`: the mean of models or updates, without a server."""

from collections.abc import Iterable, Sequence
from functools import cache
from sys import float_info
from typing import Any

import numpy as np

from afflux import ops
from afflux._engine import has_float64, lend_trees, structure
from afflux.aggregation.reports import Pulled
from afflux.aggregation.statistics import mixed_buffers
from afflux.arrays.fields import write_all
from afflux.arrays.interop import FLOATS, as_held, first_beyond, is_same, is_torch, readable_copy, types_of
from afflux.arrays.layout import Layout, Tree
from afflux.arrays.roles import Roles, is_known_statistic, warn_of_means
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.exact import ordered_sum
from afflux.ops.validation import a_thread_count, optional, unreadable
from afflux.rules.rule import Float64
from afflux.server.inputs import InputAdapter, Memory, is_tree, require_own_memory, within

Array = ops.Array
_warn_once = cache(warn_of_means)
_ROLES_OF_VECTOR: Roles = {"it": "trained"}


def aggregate(
    trees: "Iterable[Array | Tree]",
    weights: Sequence[float],
    out: "Array | Tree | None" = None,
    roles: Roles | None = None,
    *,
    num_threads: int | None = None,
) -> "Array | Tree":
    """Return the weighted mean of models, updates or gradients, computed in one sweep.

        out = sum_i w_i trees[i],  w_i = weights[i] / sum_k weights[k]

    summed in float64 in the order of the trees, and rounded once to the dtype of `out`. The bits do not depend on
    threads or instruction sets. Weights that add up to 1, up to rounding, are used as they are.

    Args:
        trees: K vectors (d,), or trees of arrays with the same names and shapes, as for `Server.push`. Each has memory
            of its own.
        weights: (K,) finite numbers with a sum that is not 0, such as numbers of examples.
        out: where the mean is written: arrays like those of a tree. It may be trees[0] itself, and must not overlap
            other trees. None: new arrays, of the library and the dtypes of trees[0].
        roles: as for `Layout.of`. Arrays are treated as by a server: statistics have the mean by the same weights (the
            plain mean, if one is negative), and integers among them are rounded in each call: a counter in an `out`
            that is trees[0] of the next call, with weights .4 and .6, is 100 after 100 calls of replies that add 1,
            in place of 60; an array of float64 counts to 60. Copied arrays are those of the tree of the largest weight;
            constants must be equal; local arrays of `out` do not change.
        num_threads: the largest number of threads; None: all CPUs that this process may use.

    Returns:
        `out`, or the new tree or vector.

    Raises:
        AffluxError: trees of other names, shapes or dtypes, wrong weights, an `out` that cannot be written: nothing was
            written. Or a value that is not finite, or not once it is rounded to the dtype of `out`: then `out` may have
            been overwritten.
        UnavailableError: arrays on a GPU; a `Server` takes them.

    Cost: each array is read once, and `out` is written once. Arrays that are strided, or an `out` of float16, bfloat16
    or of several dtypes, are copied. For vectors and flat dicts of NumPy's and torch's own arrays, all trained or
    statistics of torch's names, the layout (names, shapes and types) is made once, and kept for 64 kinds of trees.

    >>> import numpy as np
    >>> from afflux import aggregate
    >>> models = [{"w": np.full(2, value), "steps": np.array(steps)} for value, steps in ((1.0, 2), (5.0, 5))]
    >>> aggregate(models, [3, 1])
    {'w': array([2., 2.]), 'steps': array(3)}
    """
    inputs = _listed(trees)
    if not is_tree(inputs[0]):  # vectors are trees of one array, which messages call "it"
        vectors, flat_out = [{"it": tree} for tree in inputs], None if out is None else {"it": out}
        mean: Any = aggregate(vectors, weights, flat_out, _ROLES_OF_VECTOR, num_threads=num_threads)
        return mean["it"]
    threads = ops.threads(optional(a_thread_count)("aggregate", "num_threads", num_threads), "aggregate")
    numbers = _shares(weights, len(inputs))
    adapter = _adapter_of(inputs[0], roles, threads)
    layout, memory = adapter.layout, list[Memory]()
    assert layout is not None  # of a tree
    table, like = adapter.plain_arrays("float32")
    updates = None if table is None or like is None else lend_trees(table, like, inputs)
    buffers: Float64 | None = None
    if updates is None:
        updates, buffers = _read_all(inputs, numbers, adapter, memory)
    target: Any = np.zeros(layout.size, updates[0].dtype)
    if out is not None:
        adapter.copy_out("aggregate", Pulled(target, 0, buffers), out, check=True)
        target = _parts_of(out, layout) or target
    require_own_memory("aggregate", "trees[{}]".format, memory)
    _sweep(updates, numbers, target, layout, threads)
    if out is None:
        try:
            return adapter.copied_tree(Pulled(target, 0, buffers), copy=False)
        except (AffluxError, UnavailableError) as error:
            raise _about("the mean", error) from None
    if not isinstance(target, ops.Parts):
        adapter.copy_out("aggregate", Pulled(target, 0, buffers), out)
    elif layout.apart:
        write_all(layout._writes(out, None, buffers, adapter.constants if layout.constants else None))
    return out


#: Adapters for trees that are alike, by what `structure` returns and the number of threads.
_adapters: dict[Any, InputAdapter] = {}
_MOST_ADAPTERS = 64


def _adapter_of(tree: Tree, roles: Roles | None, threads: int) -> InputAdapter:
    """Return an adapter for trees like this one. It is kept if it depends on names, shapes and types alone."""
    facts = structure(tree) if roles in (None, _ROLES_OF_VECTOR) else None
    if facts is not None and (cached := _adapters.get((facts, threads))) is not None:
        return cached
    try:
        layout = Layout.of(tree, roles=roles)
        adapter, _ = InputAdapter.of(tree, "update", threads, layout)
    except (AffluxError, UnavailableError) as error:
        raise _about("trees[0]", error) from None
    _warn_once(layout.unknown_statistics)
    if adapter.plane.gpu is not None:
        raise UnavailableError(f"[aggregate] trees is on {adapter.plane.gpu}: use a Server")
    depends_on_values = layout.copied or layout.constants or layout.locals or layout.aliases
    if facts is not None and not depends_on_values and all(is_known_statistic(field.name) for field in layout.buffers):
        if len(_adapters) >= _MOST_ADAPTERS:
            _adapters.clear()
        _adapters[facts, threads] = adapter
    return adapter


def _about(subject: str, error: Exception) -> Exception:
    """Return the error of `aggregate` about `subject`, of an error about one tree."""
    problem = str(error).removeprefix("[Server] params: ").removeprefix("[aggregate] ")
    return type(error)(f"[aggregate] {subject}: {problem}")


def _listed(trees: object) -> list[Any]:
    try:
        inputs: list[Any] = list(trees)  # type: ignore[call-overload]
    except Exception as error:
        unreadable("[aggregate] trees", error)
    if not inputs:
        raise AffluxError("[aggregate] trees is empty")
    return inputs


def _shares(weights: object, count: int) -> Float64:
    """Return the weights, divided by their sum."""
    try:
        numbers = np.array(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise AffluxError(f"[aggregate] weights are no numbers: {error}") from None
    if numbers.shape != (count,):
        raise AffluxError(f"[aggregate] weights has shape {numbers.shape}, trees holds {count}")
    total = ordered_sum(numbers.tolist())  # not finite if a weight is not
    if not abs(total) < np.inf or total == 0:
        raise AffluxError("[aggregate] weights must be finite, with a sum that is finite and not 0")
    return numbers if abs(total - 1.0) <= count * float_info.epsilon else numbers / total


def _read_all(
    trees: list[Tree], weights: Float64, adapter: InputAdapter, memory: list[Memory]
) -> tuple[list[ops.Parts], Float64 | None]:
    """Return the parameters of trees, and the mean of their buffers; `memory` gets their own arrays."""
    layout, parts, buffers = adapter.layout, list[list[Any]](), list[Float64 | None]()
    assert layout is not None  # of a tree
    for i, tree in enumerate(trees):
        originals = list[Any]()
        try:
            parts.append(as_held(layout._float_parts(tree, originals)))
            if layout.constants:
                adapter.constants.check(layout._leaves(tree))
            values = layout.flatten_buffers(tree) if layout.buffers_size else None
            memory.append(adapter.memory(tree, originals, tree, None))
        except (AffluxError, UnavailableError) as error:
            raise _about(f"trees[{i}]", error) from None
        bad = None if values is None else first_beyond(values[: layout.averaged_size], float_info.max)
        buffers.append(values)
        if bad is not None:
            raise AffluxError(f"[aggregate] trees[{i}] has a non-finite value{within(layout.buffers, bad)}")
    averaged = layout.averaged_size
    mean = mixed_buffers("update", buffers[0], buffers, weights, [True] * len(trees), 1.0, averaged)
    dtype = "float64" if any(map(has_float64, parts)) else "float32"
    return [ops.Parts(arrays, layout._borders, dtype=dtype) for arrays in parts], mean


def _parts_of(out: Tree, layout: Layout) -> ops.Parts | None:
    """Return the parameters of `out`, if the engine can write them where they are."""
    arrays = layout._parameter_matcher.find(out)
    kinds = types_of(arrays)
    if len(kinds) > 1 or not kinds <= FLOATS - {"float16", "bfloat16"} or layout.aliases:
        return None
    arrays = [array.detach() if is_torch(array) else array for array in arrays]
    plain = all(array.is_contiguous() if is_torch(array) else readable_copy(array) is None for array in arrays)
    return ops.Parts(arrays, layout._borders) if plain else None


def _sweep(updates: list[ops.Parts], weights: Float64, target: Any, layout: Layout, threads: int) -> None:
    """Write the weighted sum to the target."""
    trees, params_weight, flags = updates, 0.0, list[bool]()
    if isinstance(target, ops.Parts) and all(map(is_same, trees[0].arrays, target.arrays)):
        params_weight, updates, weights = float(weights[0]), updates[1:], weights[1:]
    combine = ops.Combine(updates, np.ascontiguousarray(weights), params_weight, float_info.max)
    ops.apply(ops.Pass(target, target, combine, step=ops.Step("assign")), num_threads=threads, done=flags)
    if flags[0]:
        return
    overwritten = len(trees) - len(updates)
    for i, tree in enumerate(updates, overwritten):
        for field, array in zip(layout.fields, tree.arrays, strict=True):
            if first_beyond(array, float_info.max) is not None:
                raise AffluxError(f"[aggregate] trees[{i}] has a non-finite value (in {field.name})")
    subject = "trees[0], which out has overwritten, or the mean" if overwritten else "the mean"
    raise AffluxError(f"[aggregate] {subject} has a non-finite value")
