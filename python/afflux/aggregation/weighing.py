"""The weights and the step of a round. Arrivals whose values make the rule's numbers unusable are rejected."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite, nan
from sys import float_info
from types import MappingProxyType

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from afflux import ops
from afflux.aggregation.clipping import clip_factors, next_window
from afflux.aggregation.inner_products import RoundVectors
from afflux.aggregation.limits import ArrivalError, Limits
from afflux.aggregation.plane import Slot, Vector
from afflux.arrays.interop import frozen, is_masked
from afflux.ops.errors import AffluxError
from afflux.ops.exact import ordered_sum
from afflux.ops.validation import brief
from afflux.rules.rule import Arrivals, FactColumns, Float64, Rule, Weights


class RoundWeights(Struct, frozen=True, eq=False):
    """The rule's decision about a round."""

    weights: Weights  #: of all arrivals
    step: ops.Step
    clips: Float64 | None  #: (M,) the factors by which weights were multiplied; None without a clip
    window: tuple[float, ...]  #: the norms that the next clip reads


def decide(
    rule: Rule,
    arrivals: Arrivals,
    vectors: RoundVectors | None,
    limits: Limits,
    window: tuple[float, ...],
    *,
    removable: bool,
) -> RoundWeights:
    """Return the weights of all arrivals, clipped, and the step.

    If a weight is not finite, or could cause an overflow, its arrival is rejected, and the rule weighs the other
    arrivals again, as if the push had been refused. If all are rejected, there is no step.

    Args:
        rule: the rule.
        arrivals: the buffer in canonical order.
        vectors: the `inner_sweep` of `arrivals`.
        limits: the limits of the server.
        window: the norms of arrivals of earlier rounds, oldest first.
        removable: whether an arrival can be rejected; otherwise its fault is an error.

    Raises:
        AffluxError: a number is unusable, and no arrival alone has caused it: the rule would also give it to arrivals
            that are all equal.
    """
    try:
        weights, step = _decide(rule, arrivals, limits)
    except ArrivalError as error:
        if not removable or _fails_without_clients(rule, arrivals, limits):
            raise
        return _decide_without(error.reasons, rule, arrivals, vectors, limits, window)
    if limits.clip_norms is None:
        return RoundWeights(weights, step, None, window)
    return _clipped(weights, step, arrivals, limits, window)


def _decide_without(
    reasons: Mapping[int, str],
    rule: Rule,
    arrivals: Arrivals,
    vectors: RoundVectors | None,
    limits: Limits,
    window: tuple[float, ...],
) -> RoundWeights:
    """Return the decision after rejecting these arrivals, and those whose weights are then unusable."""
    rejected = {**reasons}
    while places := [i for i in range(len(arrivals)) if i not in rejected]:
        part_vectors = None if vectors is None else vectors.select(places)
        part = _selected(arrivals, places, part_vectors)
        try:
            weights, step = _decide(rule, part, limits)
        except ArrivalError as error:
            rejected |= {places[i]: why for i, why in error.reasons.items()}
        else:
            return _expanded(_clipped(weights, step, part, limits, window), places, rejected)
        finally:
            if part_vectors is not None:
                part_vectors.close()
    vector_count = len(rule.needs.rule_vectors)
    no_weights = Weights(_NO_NUMBERS, (0.0,) * vector_count, skip=True)
    clips = None if limits.clip_norms is None else _NO_NUMBERS
    return _expanded(RoundWeights(no_weights, rule.step(arrivals), clips, window), [], rejected)


def _decide(rule: Rule, arrivals: Arrivals, limits: Limits) -> tuple[Weights, ops.Step]:
    weights, step = checked_weights(rule, arrivals), rule.step(arrivals)
    if not isinstance(step, ops.Step):
        raise AffluxError(f"[{rule.name}] step gave {step!r}, must be an afflux.ops.Step")
    lr = float(step.lr)
    if not -inf < lr < inf:
        raise AffluxError(f"[{rule.name}] step gave lr {lr}, must be finite")
    next_noise = () if weights.next_noise is None else weights.next_noise.tolist()
    limits.check_step(rule, step, lr, weights.vectors.tolist(), weights.rule_vectors, weights.noise, next_noise)
    return weights, step


def _neutral(values: Float64) -> Float64:
    """Return 1 for each arrival; NaN if no client has sent the number: then the rule lacks it, not an arrival."""
    return frozen(np.full(len(values), nan if np.isnan(values).all() else 1.0), np.float64)


def _fails_without_clients(rule: Rule, arrivals: Arrivals, limits: Limits) -> bool:
    """Return whether the rule's numbers are unusable for fresh arrivals of one example and a loss of 1, too.

    All their vectors, and the rule vectors, have one element: 1.
    """
    count = len(arrivals)
    ones = np.ones(count + len(rule.needs.rule_vectors))
    memory = dict.fromkeys(rule.needs.rule_vectors, Vector(np.ones(1)))
    vectors = RoundVectors([Slot(np.ones(1))] * count, memory, _inner_of_ones)
    neutral = replace(
        arrivals,
        versions=frozen(np.full(count, arrivals.version), np.int64),
        staleness=frozen(np.zeros(count), np.int64),
        num_examples=frozen(ones[:count], np.int64),
        losses=_neutral(arrivals.losses),
        measured_norms=frozen(ones[:count], np.float64),
        local_steps=frozen(np.minimum(arrivals.local_steps, 1), np.int64),
        facts=FactColumns({name: _neutral(fact) for name, fact in arrivals.facts.items()}),
        gram_matrix=None if arrivals.gram_matrix is None else frozen(np.ones((len(ones), len(ones))), np.float64),
        inner_sweep=None if arrivals.inner_sweep is None else vectors,
    )
    try:
        _decide(rule, neutral, limits)
    except AffluxError:
        return True
    except Exception:  # a part of the user's own that cannot weigh such arrivals
        return False
    return False


def _inner_of_ones(
    slots: Sequence[Slot], weights: Float64 | None, memory: Vector | None, shift: float, own_weight: float
) -> ops.InnerProducts:
    return ops.inner(slots, weights, memory=memory, shift=shift, memory_weight=own_weight, num_threads=1)


def _selected(arrivals: Arrivals, places: Sequence[int], vectors: RoundVectors | None) -> Arrivals:
    """Return the arrivals at these indices; `vectors` are theirs."""
    gram = arrivals.gram_matrix
    if gram is not None:
        vector_count = len(gram) - len(arrivals)
        rows = [*range(vector_count), *(vector_count + i for i in places)]
        gram = frozen(gram[np.ix_(rows, rows)], np.float64)
    columns = {
        name: frozen(getattr(arrivals, name)[places], getattr(arrivals, name).dtype)
        for name in ("versions", "staleness", "num_examples", "losses", "measured_norms", "local_steps")
    }
    facts = FactColumns({name: frozen(own[places], np.float64) for name, own in arrivals.facts.items()})
    client_ids = tuple([arrivals.client_ids[i] for i in places])
    return replace(arrivals, client_ids=client_ids, gram_matrix=gram, inner_sweep=vectors, facts=facts, **columns)


def _clipped(
    weights: Weights, step: ops.Step, arrivals: Arrivals, limits: Limits, window: tuple[float, ...]
) -> RoundWeights:
    """Return the decision with weights, in the direction and in rule vectors, that are clipped by norm."""
    if limits.clip_norms is None:
        return RoundWeights(weights, step, None, window)
    norms = arrivals.measured_norms.tolist()
    clips = frozen(clip_factors(limits.clip_norms, window, norms), np.float64)
    if (clips < 1.0).any():
        following = weights.next
        if following is not None:
            vector_count = len(following)
            following = frozen(following * np.concatenate([np.ones(vector_count), clips]), np.float64)
        weights = replace(weights, vectors=frozen(weights.vectors * clips, np.float64), next=following)
    return RoundWeights(weights, step, clips, next_window(window, norms))


def _expanded(decision: RoundWeights, places: Sequence[int], rejected: Mapping[int, str]) -> RoundWeights:
    """Return the decision about all arrivals, from that about the arrivals at `places`; the others are rejected."""
    weights, count = decision.weights, len(places) + len(rejected)

    def spread(numbers: Float64 | None, value: float) -> Float64 | None:
        """Return the numbers of all arrivals; `value` for those that are rejected."""
        if numbers is None:
            return None
        vector_count = numbers.shape[-1] - len(places)  # columns of rule vectors
        out = np.full((*numbers.shape[:-1], vector_count + count), value)
        out[..., [*range(vector_count), *(vector_count + i for i in places)]] = numbers
        return frozen(out, np.float64)

    vectors = spread(weights.vectors, 0.0)
    assert vectors is not None
    spread_weights = replace(
        weights,
        vectors=vectors,
        next=spread(weights.next, 0.0),
        rejected={**{places[i]: why for i, why in weights.rejected.items()}, **rejected},
        cosines=spread(weights.cosines, nan),
    )
    return replace(decision, weights=spread_weights, clips=spread(decision.clips, 1.0))


def checked_weights(rule: Rule, arrivals: Arrivals) -> Weights:
    """Return the rule's weights; with cached rows their sum over the accepted arrivals is 1."""
    output, name, needs = rule.weigh(arrivals), rule.name, rule.needs
    weights = output if isinstance(output, Weights) else Weights(output)
    count, vector_count = len(arrivals.client_ids), len(needs.rule_vectors)
    vectors = numbers(name, "weights", weights.vectors, (count,))
    values: list[float] = vectors.tolist()
    if not all(map(isfinite, values)):
        reasons = {i: f"weight {value}, must be finite" for i, value in enumerate(values) if not isfinite(value)}
        i = min(reasons)
        message = f"[{name}] weigh gave client {brief(arrivals.client_ids[i])} the weight {values[i]}, must be finite"
        raise ArrivalError(message, reasons)
    coefficients, rule_vectors = weights.rule_vectors, _NO_NUMBERS
    if type(coefficients) is not tuple or coefficients:
        rule_vectors = numbers(name, "rule_vectors", coefficients, (vector_count,))
    if rule.calibrate.cached:
        total = ordered_sum(values)
        if not -inf < total < inf or (total == 0 and vectors.any()):
            raise AffluxError(f"[{name}] the weights that weigh gave sum to {total}, which is no divisor")
        # Weights that the rule has divided by their sum already add up to 1, up to rounding, and stay as they are.
        if total != 0 and abs(total - 1.0) > count * float_info.epsilon:
            vectors, rule_vectors = frozen(vectors / total, np.float64), rule_vectors / total
    if not isinstance(weights.skip, (bool, np.bool)):  # no union, which each call would make
        raise AffluxError(f"[{name}] weigh gave skip {brief(weights.skip)}, must be True or False")
    if weights.rejected:
        _check_rejected(name, arrivals, weights.rejected, values)
    scalars = weights.scalars
    if scalars is not None:
        if not isinstance(scalars, Mapping) or {*scalars} != {*needs.scalars}:
            raise AffluxError(f"[{name}] weigh gave scalars {brief(scalars)}, must be of {sorted(needs.scalars)}")
        latest = numbers(name, "scalars", list(scalars.values()), (len(scalars),))
        scalars = MappingProxyType(dict(zip(scalars, latest.tolist(), strict=True)))
    trim, noise = _number(name, "trim", weights.trim), _number(name, "noise", weights.noise)
    if trim != 0:
        _check_trim(rule, arrivals, trim, values)
    if noise != 0:
        _check_noise(rule, noise)
    return Weights(
        vectors,
        tuple(rule_vectors.tolist()),
        None if weights.next is None else numbers(name, "next", weights.next, (vector_count, vector_count + count)),
        scalars,
        weights.rejected,
        None if weights.cosines is None else numbers(name, "cosines", weights.cosines, (count,)),
        bool(weights.skip),
        _number(name, "params", weights.params),
        trim,
        noise,
        None if weights.next_noise is None else _checked_next_noise(rule, weights),
    )


def _check_rejected(name: str, arrivals: Arrivals, rejected: Mapping[int, str], values: list[float]) -> None:
    """Reject reasons that are not text, or are about no arrival, or about one of some that count nevertheless."""
    count = len(values)
    indices = isinstance(rejected, Mapping) and [i for i in rejected if isinstance(i, int | np.integer)]
    if not indices or len(indices) < len(rejected) or not 0 <= min(indices) <= max(indices) < count:
        raise AffluxError(f"[{name}] weigh rejects {brief(rejected)}, must be by index of {count} arrivals")
    for i, reason in rejected.items():
        client = brief(arrivals.client_ids[i])
        if not isinstance(reason, str):
            raise AffluxError(f"[{name}] weigh rejects client {client} with {brief(reason)}, must be text")
        if values[i] != 0 and len(rejected) < count:
            raise AffluxError(f"[{name}] weigh rejects client {client}, whose weight is {values[i]}, must be 0")


def _check_noise(rule: Rule, noise: float) -> None:
    """Reject a standard deviation of the noise in the direction that the rule may not give."""
    if not rule.needs.noise:
        raise AffluxError(f"[{rule.name}] weigh gave noise {noise}, but it has no needs = Needs(noise=True)")
    if noise < 0:
        raise AffluxError(f"[{rule.name}] weigh gave noise {noise}, must be at least 0")


def _checked_next_noise(rule: Rule, weights: Weights) -> Float64:
    """Return the coefficients of the noise in the new rule vectors."""
    if not rule.needs.noise:
        raise AffluxError(f"[{rule.name}] weigh gave next_noise, but it has no needs = Needs(noise=True)")
    if weights.next is None:
        raise AffluxError(f"[{rule.name}] weigh gave next_noise without next")
    return numbers(rule.name, "next_noise", weights.next_noise, (len(rule.needs.rule_vectors),))


def _check_trim(rule: Rule, arrivals: Arrivals, trim: float, values: list[float]) -> None:
    """Reject a share that is cut at both ends which the rule may not give."""
    name = rule.name
    if not rule.needs.trim:
        raise AffluxError(f"[{name}] weigh gave trim {trim}, but it has no needs = Needs(trim=True)")
    if not 0 <= trim <= 0.5:
        raise AffluxError(f"[{name}] weigh gave trim {trim}, must be from 0 to 0.5")
    if min(values, default=0.0) < 0:
        reasons = {i: f"weight {value}, negative with trim" for i, value in enumerate(values) if value < 0}
        i = min(reasons)
        client = brief(arrivals.client_ids[i])
        raise ArrivalError(f"[{name}] weigh gave client {client} the weight {values[i]}, negative with trim", reasons)


def _number(name: str, field: str, output: object) -> float:
    """Return a number of a result of weigh, finite."""
    return output if type(output) is float and isfinite(output) else float(numbers(name, field, output, ()))


def numbers(name: str, field: str, output: object, shape: tuple[int, ...]) -> Float64:
    """Return a read-only copy of a result of weigh: finite numbers of this shape.

    The caller checks that weights are finite.
    """
    try:
        array = np.asarray(output)
        if array.dtype.kind not in "fiub":
            raise TypeError(f"of {array.dtype}")
        if array is not output and isinstance(output, np.ndarray) and is_masked(output):
            raise TypeError("masked")
    except (TypeError, ValueError) as error:
        raise AffluxError(f"[{name}] weigh gave {field} {output!r}, must be numbers ({error})") from None
    if array.shape != shape:
        raise AffluxError(f"[{name}] weigh gave {field} of shape {array.shape}, expected {shape}")
    if field != "weights" and not np.isfinite(array).all():
        raise AffluxError(f"[{name}] weigh gave {field} {output!r}, must be finite")
    copy: Float64 = frozen(array, np.float64)
    return copy


_NO_NUMBERS = np.empty(0)
