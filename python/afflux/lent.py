"""Vectors that a round reads where the caller keeps them: no copy at the push, and the look for what is not finite is
part of the round's own sweep.
"""

from afflux.rules.rule import Rule


def why_not(rule: Rule, *, inplace: bool, streaming: bool) -> str | None:
    """Why a server copies whatever is pushed; None if it may read it in place.

    A round that has read a value which is not finite is made again without that vector, so it must not overwrite
    anything but memory of its own.
    """
    if streaming:
        return "memory='streaming' adds it up at once"
    if inplace:
        return "inplace=True overwrites params"
    if rule.needs.gram:
        return f"{rule.name} takes inner products first"
    if rule.calibrate.cached:
        return f"{rule.name} overwrites cached rows"
    if rule.memories:
        return f"{rule.name} overwrites its {', '.join(rule.memories)}"
    return None
