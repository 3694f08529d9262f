"""Differential privacy: the epsilon of rules that clip updates and add noise."""

from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import positive
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
    if not positive("epsilon", "delta", delta) < 1:
        raise AffluxError(f"[epsilon] delta is {delta!r}, must be less than 1")
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise UnavailableError(f"[epsilon] needs dp-accounting: pip install 'afflux[dp]' ({error})") from None
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(GaussianDpEvent(weigh.noise_multiplier), weigh.participations)
    return float(accountant.get_epsilon(delta))
