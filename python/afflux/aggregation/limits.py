"""Limits on the vectors that a server accepts, so that no result of a round can overflow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afflux import ops
from afflux.ops.errors import AffluxError
from afflux.rules.optimizers import REACH
from afflux.rules.rule import Rule

#: The default of `ServerOptions.max_abs`, and the largest one, by the dtype of params.
MAX_ABS = {"float32": 1e15, "float64": 1e150}
MOST_MAX_ABS = {"float32": 1e30, "float64": 1e300}
#: The number of steps in a row that must not overflow: params change in one step by at most the largest finite number
#: divided by this number.
_STEPS = 1e6


class RoundError(AffluxError):
    """Numbers of a rule with which a round could overflow, or cannot be made."""


class ArrivalError(RoundError):
    """Numbers of a round that single arrivals have caused."""

    def __init__(self, message: str, reasons: Mapping[int, str]) -> None:
        super().__init__(message)
        self.reasons = reasons  #: index of an arrival -> its fault; not empty


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server."""

    max_abs: float  #: the largest accepted absolute value of an element in a slot
    max_norm: float  #: the largest accepted Euclidean norm; infinite: no limit
    largest: float  #: the largest finite number of the dtype of params
    clip_norms: float | None = None  #: the multiple of the median norm beyond which weights are reduced; None: no limit

    def allow(self, low: float, high: float, norm: float) -> bool:
        """Return whether a finite vector with this least and largest element and this norm is within the limits."""
        return -self.max_abs <= low and high <= self.max_abs and norm <= self.max_norm

    def reason(self, low: float, high: float, norm: float) -> str:
        """Return the reason why a vector is not within the limits."""
        largest = max(-low, high)
        if largest > self.max_abs:
            return f"an element of magnitude {largest:.3g}, max_abs is {self.max_abs:g}"
        return f"the norm {norm:.6g}, max_norm is {self.max_norm:g}"

    def check_step(
        self,
        rule: Rule,
        step: ops.Step,
        lr: float,
        weights: list[float],
        vector_weights: Sequence[float] = (),
        noise: float = 0.0,
        next_noise: Sequence[float] = (),
    ) -> None:
        """Reject numbers of a rule with which vectors within the limits could cause an overflow.

        Of the values that clients send, the check depends only on those that determine the weights.

        Args:
            rule: the rule, for the message.
            step: the result of its step part.
            lr: its learning rate.
            weights: the weights of the arrivals.
            vector_weights: the weights of the rule vectors.
            noise: the standard deviation of the noise in the direction; no element is beyond 9 of them.
            next_noise: the same of the noise in each new rule vector.

        Raises:
            ArrivalError: params or a state could overflow within a million steps, also if all arrivals had the weight
                of one of them.
            RoundError: they could overflow, and no weight is so large.
            AffluxError: the step's kind has no entry in `REACH`.
        """
        if step.kind not in REACH:
            raise AffluxError(f"[{rule.name}] step gave the kind {step.kind!r}, must be one of {', '.join(REACH)}")
        if 9 * (sigma := max(map(abs, next_noise), default=0.0)) * _STEPS > self.largest:
            raise RoundError(f"[{rule.name}] with next_noise {sigma:.3g} a rule vector could overflow")
        if self._fit(step, lr, [*weights, *vector_weights], noise):
            return
        problem = f"elements of magnitude {self.max_abs:g} could overflow"
        message = (
            f"[{rule.name}] with lr {lr:.3g}{f', noise {noise:.3g}' if noise else ''} and weights whose magnitudes add "
            f"up to {sum(map(abs, [*weights, *vector_weights])):.3g}, {problem}: make Server's max_abs or the rule's "
            "numbers smaller"
        )
        reasons = {
            i: f"weight {weight:.3g}, with which {problem}"
            for i, weight in enumerate(weights)
            if not self._fit(step, lr, [weight] * len(weights), noise)
        }
        raise ArrivalError(message, reasons) if reasons else RoundError(message)

    def _fit(self, step: ops.Step, lr: float, weights: list[float], noise: float) -> bool:
        """Return whether these weights and this noise cause no overflow within a million steps."""
        # Twice: differences of models, and of cached rows. Rounded up.
        direction = (2 * sum(map(abs, weights)) * self.max_abs + 9 * noise) * (1 + 1e-9)
        params, states = REACH[step.kind]
        try:  # a NaN does not fit
            fits = abs(lr) * params(step, direction) * _STEPS <= self.largest
            return fits and states(step, direction, _STEPS) <= self.largest
        except ZeroDivisionError:  # a beta of 1, or an epsilon of 0: the engine refuses it by name
            return True
