"""The facts of a push: the numbers of a client that a rule or the options of the server list."""

from collections.abc import Collection, Mapping

from afflux.aggregation.admission import ClientError
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, finite, known_names
from afflux.rules.rule import EXAMPLES, ClientId, Facts, Rule
from afflux.rules.weights import LEAST_GIVEN, MOST_GIVEN


def facts_of(client_id: ClientId, facts: object, names: Collection[str], rule: Rule) -> Facts:
    """Return the facts of a push, checked.

    Args:
        client_id: the client's id.
        facts: the argument of the push: a mapping, or None.
        names: the names that the server takes.
        rule: the rule of the server, whose needs list the facts that must be there.

    Raises:
        ClientError: the argument is not a mapping, a name is not one of `names`, or one that the rule needs is missing.
        AffluxError: a value is not a finite number, or "num_examples" is not in the range of weights.
    """
    subject = f"[push] client {brief(client_id)}'s facts"
    if not (facts is None or isinstance(facts, Mapping)):
        raise ClientError(f"{subject} are {brief(facts)}, must be numbers by name")
    values: dict[str, float] = {}
    for name in facts or ():
        if not isinstance(name, str) or name not in names:
            raise ClientError(
                f"{subject} have {brief(name)}, which neither {rule.name} nor Server(facts=...) lists; "
                f"{known_names(name, names) if names else 'no names are known'}"
            )
        values[name] = finite("push", f"client {brief(client_id)}'s {name}", (facts or {})[name])
    examples = values.get(EXAMPLES, 1.0)
    if not LEAST_GIVEN <= examples <= MOST_GIVEN:
        raise AffluxError(
            f"[push] client {brief(client_id)}'s {EXAMPLES} is {examples}, "
            f"must be from {LEAST_GIVEN:g} to {MOST_GIVEN:g}"
        )
    for name in rule.needs.facts:
        if name not in values:
            raise ClientError(f"{subject} lack {name!r}, by which {rule.name} weighs")
    return tuple(sorted(values.items()))
