"""Differential privacy: the epsilon of rules that clip updates and add noise, and the noise for an epsilon."""

from collections.abc import Callable
from functools import partial
from typing import Any

from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import at_most, count_of, positive
from afflux.rules.presets.dp_fedbuff import ClippedMean
from afflux.rules.rule import Rule


def epsilon(rule: Rule, delta: float) -> float:
    """Return epsilon of the (epsilon, delta)-differential privacy of a client, for all params that a server publishes.

    By dp-accounting, for the composition of as many Gaussian mechanisms as the rule has `participations`, without
    amplification by sampling. No rule of the server may have had less noise, or another clip, buffer or divisor.
    docs/results/privacy.md says what the claim is about.

    Args:
        rule: `afflux.rules.dp_fedbuff` with a noise_multiplier and participations.
        delta: between 0 and 1, less than 1 / (number of clients).

    Raises:
        AffluxError: the rule is another one, or without noise or a limit of participations; or an invalid delta.
        UnavailableError: dp-accounting is not installed.
    """
    weigh = rule.weigh if isinstance(rule, Rule) else None
    if type(weigh) is not ClippedMean or not weigh.noise_multiplier or weigh.participations is None:
        raise AffluxError("[epsilon] rule must be dp_fedbuff with a noise_multiplier and participations")
    library, accountant = _accounting("epsilon", delta)
    composed = accountant().compose(library.GaussianDpEvent(weigh.noise_multiplier), weigh.participations)
    return float(composed.get_epsilon(delta))


def noise_multiplier(epsilon: float, delta: float, participations: int) -> float:
    """Return the noise_multiplier of a `dp_fedbuff(participations=)` that has this epsilon, or slightly less.

    The result is at most 0.001 above the least such number. A call takes some seconds.

    Args:
        epsilon: greater than 0, at most 100.
        delta: as for the function `epsilon`.
        participations: the most rounds that a client is in.

    Raises:
        AffluxError: an invalid argument.
        UnavailableError: dp-accounting is not installed.
    """
    wanted = at_most(100)("noise_multiplier", "epsilon", epsilon)  # for more it takes minutes
    count = count_of(1)("noise_multiplier", "participations", participations)
    library, accountant = _accounting("noise_multiplier", delta)

    def event(noise: float) -> Any:
        return library.SelfComposedDpEvent(library.GaussianDpEvent(noise), count)

    return float(library.calibrate_dp_mechanism(accountant, event, wanted, delta, tol=1e-3))


def _accounting(op: str, delta: float) -> tuple[Any, Callable[[], Any]]:
    """Return the package dp_accounting, and what makes an accountant of it."""
    if not positive(op, "delta", delta) < 1:
        raise AffluxError(f"[{op}] delta is {delta!r}, must be less than 1")
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise UnavailableError(f"[{op}] needs dp-accounting: pip install 'afflux[dp]' ({error})") from None
    return dp_accounting, partial(PLDAccountant, dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
