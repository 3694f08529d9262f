"""The parts of an aggregation rule, and the facts about a round that they read. A rule has three slots.

    weigh      one float64 weight per buffered arrival, and for some rules one per rule vector of the server
    calibrate  whether per-client cached rows enter the direction
    step       how the direction changes params

Functions in the first and third slot are part of the exact path. They may use + - * / sqrt, comparisons, afflux.exp,
log and pow, and the helpers of afflux.ops.exact. They must not use operations whose last bit differs between CPUs
(np.exp, np.power, np.dot, @, np.sum; test_exact_path.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec import field as struct_field

from afflux import ops
from afflux._engine import MOST_RULE_VECTORS
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.validation import (
    as_text,
    brief,
    check_fields,
    count_of,
    flag,
    instance,
    integer,
    one_of,
    one_or_less,
    optional,
    reads,
)
from afflux.rules.registry import register, to_plain

ClientId = int | str  #: ints from -2**63 to 2**64 - 1
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Scalars = Mapping[str, float]
Kind = ops.Kind
#: The facts that a client has pushed: names and finite values, sorted by name.
Facts = tuple[tuple[str, float], ...]
#: The largest number of names of facts of one server.
MOST_FACTS = 16
#: The name of the fact that replaces a client's number of examples, for weights that are no whole numbers.
EXAMPLES = "num_examples"


class InnerSweep(Protocol):
    """The function that Arrivals.inner calls: ops.inner over the vectors of a round, with a rule vector by its name."""

    def __call__(
        self, weights: Float64 | None, rule_vector: str | None, shift: float, own_weight: float, /
    ) -> ops.InnerProducts:
        """Return the products, in the order of the arrivals."""
        ...


class FactColumns(dict[str, Float64]):
    """`Arrivals.facts`."""

    def __missing__(self, name: str) -> Float64:
        raise AffluxError(f"[Arrivals] fact {name!r} is for rules whose weigh part has Needs(facts=({name!r},))")


class Arrivals(Struct, frozen=True, eq=False):
    """The facts about a full buffer, frozen, in canonical order: by client (see `client_order`), pulled version and
    join.

    Attributes:
        version: the server's version t before this step.
        client_ids: the clients, M of them.
        versions: (M,) int64, the version that each client pulled.
        staleness: (M,) int64, version - version pulled, >= 0.
        num_examples: (M,) int64; float64 if a client has pushed the fact "num_examples", which replaces the number.
        losses: (M,) float64, as reported by the clients; NaN if not reported.
        measured_norms: (M,) float64, Euclidean norms of the pushed vectors for reports; NaN for vectors that a step
            reads where they are. For a rule there is `norms`.
        gram_matrix: what `gram` returns; None if the rule does not need it.
        scalars: the rule's own numbers after the last round.
        ends_pass: under gradient scheduling: this round is the last one of its pass over all clients.
        inner_sweep: the function that `inner` calls, if the rule needs it.
        local_steps: (M,) int64, as reported by the clients (push(local_steps=...)); 0 if not reported.
        facts: by name, (M,) float64, the facts that `Needs(facts=...)` and `Server(facts=...)` list, as the clients
            have pushed them (push(facts=...)). NaN where a client has not given one; none of those in `Needs` is NaN.
            Another name raises AffluxError.
        reads_norms: whether the rule needs norms.
    """

    version: int
    client_ids: tuple[ClientId, ...]
    versions: Int64
    staleness: Int64
    num_examples: Int64 | Float64
    losses: Float64
    measured_norms: Float64
    gram_matrix: Float64 | None = None
    scalars: Scalars = struct_field(default_factory=dict)
    ends_pass: bool = False
    inner_sweep: InnerSweep | None = None
    local_steps: Int64 = struct_field(default_factory=lambda: np.zeros(0, np.int64))
    facts: Mapping[str, Float64] = struct_field(default_factory=FactColumns)
    reads_norms: bool = False

    def __len__(self) -> int:
        """Return the number of arrivals M."""
        return len(self.client_ids)

    @property
    def norms(self) -> Float64:
        """(M,) float64, Euclidean norms of the pushed vectors, if the rule needs them; none is NaN.

        Raises:
            AffluxError: the rule's needs do not have `norms`: vectors that are read where they are have none.
        """
        if not self.reads_norms:
            raise AffluxError("[Arrivals] norms are for rules whose weigh part has needs = Needs(norms=True)")
        return self.measured_norms

    @property
    def gram(self) -> Float64:
        """(R + M, R + M) float64, inner products of rule vectors and vectors, if the rule needs them.

        Raises:
            AffluxError: the rule's needs do not have `gram`.
        """
        if self.gram_matrix is None:
            raise AffluxError("[Arrivals] gram is for rules whose weigh part has needs = Needs(gram=True)")
        return self.gram_matrix

    def inner(
        self,
        weights: Float64 | None = None,
        *,
        rule_vector: str | None = None,
        shift: float = 0.0,
        own_weight: float = 0.0,
    ) -> ops.InnerProducts:
        """Return squares of the vectors, shifted by a multiple of a rule vector m, and products with a sum of them.

            x_i = u_i + shift * m,  e = own_weight * m + sum_i weights[i] x_i

        A weigh part with `Needs(inner=True)` may call it, any number of times, while it computes the weights.

        Args:
            weights: (M,) numbers; None: no vector is a part of e, and without `own_weight` there is no e.
            rule_vector: the name of m, with a `shift` or an `own_weight`.
            shift: the factor of m that is added to every vector.
            own_weight: the factor of m that is added to e, in addition to the m in the x_i.

        Returns:
            Squares <x_i, x_i> and products <x_i, e>, each (M,) float64, and the square <e, e>. Without e, products are
            None and the square is 0. `inner(rule_vector=name, own_weight=1.0)` gives the products with m.

        Raises:
            AffluxError: the rule's needs do not have `inner`, the round is already decided, or ops.inner rejects an
                argument.

        Cost: one sweep over the buffer, and over the rule vector if it is used.
        """
        if self.inner_sweep is None:
            raise AffluxError("[Arrivals] inner is for rules whose weigh part has needs = Needs(inner=True)")
        return self.inner_sweep(weights, rule_vector, shift, own_weight)


def client_order(client_id: ClientId) -> tuple[bool, ClientId]:
    """Return the key that sorts clients: ints first, by value, then texts, by code point.

    >>> sorted(["b", 2, "10", -1], key=client_order)
    [-1, 2, '10', 'b']
    """
    return isinstance(client_id, str), client_id


def names_of_facts(part: str, name: str, value: object) -> tuple[str, ...]:
    """Return the names of facts in an option: a list or tuple of at most `MOST_FACTS` different texts.

    Raises:
        AffluxError: the value is not such a list.
    """
    texts = tuple(map(as_text, value)) if isinstance(value, list | tuple) else (None,)
    names = tuple([text for text in texts if text is not None and text.isprintable() and 0 < len(text) <= 64])
    if len(set(names)) < len(texts) or len(names) > MOST_FACTS:
        raise AffluxError(
            f"[{part}] {name} is {brief(value)}, must be at most {MOST_FACTS} different names, each a str of 1 to 64 "
            "printable characters"
        )
    return names


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a weigh part beyond the facts of `Arrivals`: its attribute `needs`.

    Attributes:
        gram: all inner products; one more sweep over the buffer.
        inner: Arrivals.inner; a sweep over the buffer for each call.
        norms: Arrivals.norms; a step then copies its vectors.
        examples: Arrivals.num_examples: adapters then reject replies without the number.
        facts: Arrivals.facts of these names: `push` rejects an arrival that lacks one of them.
        rule_vectors: names of the R vectors (d,) that the server holds for the part; they start at zero, except those
            in `handed_in`.
        handed_in: the rule vectors that the user sets, with Server.set_rule_vector.
        scalars: names of the rule's own numbers, and their first values.
        passes: gradient scheduling: a client enters once per pass over all N clients, later arrivals are rejected.
        once: a client is in a buffer once: a server rejects duplicates="both", and its default is "latest". Robust
            rules need it: fast hostile clients would otherwise fill buffers.
        participations: K, the most rounds that a client is in, with `once`; later arrivals are rejected. None: any
            number. A client counts as in a round once the server has decided it, whatever its weight, also if the round
            is skipped or fails. No other rule may replace K. Not with passes or cached rows.
        max_staleness: older arrivals are dropped, as by the option of this name; the smaller limit counts. None: the
            rule takes any. No other rule may replace it.
        trim: Weights.trim may be greater than 0. Not with cached rows, clip_norms or accumulate=True.
        noise: Weights.noise and next_noise may differ from 0: the server needs a `noise_key`. Not with cached rows,
            clip_norms or averaged buffers of a model.
    """

    gram: bool = False
    inner: bool = False
    norms: bool = False
    examples: bool = False
    facts: tuple[str, ...] = ()
    rule_vectors: tuple[str, ...] = ()
    handed_in: tuple[str, ...] = ()
    scalars: Scalars = field(default_factory=dict)
    passes: bool = False
    once: bool = False
    participations: int | None = None
    max_staleness: int | None = None
    trim: bool = False
    noise: bool = False

    @property
    def products(self) -> bool:
        """Whether the vectors are read before the weights are known."""
        return self.gram or self.inner


class Weights(Struct, frozen=True, eq=False):
    """The result of a weigh part: the weights of a round, and the other decisions of a rule.

    The direction is v = params x + sum_s rule_vectors[s] m_s + sum_i vectors[i] u_i, where x are the server's params
    before the round. The same sweep replaces the rule vectors by m_r = sum_s next[r, s] m_s + sum_i next[r, R + i] u_i.
    With z ~ N(0, I), which each round draws afresh, noise z is the last term of v, and next_noise[r] z that of m_r.

    Attributes:
        vectors: (M,) float64; 0 rejects an arrival: its vector is not read, and its client's cached row does not
            change.
        rule_vectors: (R,); empty: they do not enter the direction.
        next: (R, R + M) float64; None: the rule vectors do not change.
        scalars: the rule's own numbers after this round; None: unchanged.
        rejected: by index of an arrival, the reason why its weight is 0. If all are rejected, weights may be others, as
            those of WKAFL's estimate.
        cosines: (M,) float64, for the report.
        skip: the server takes no step: the buffer is emptied, version and rule vectors do not change.
        trim: from 0 to 0.5, with `Needs(trim=True)`: the vectors' part of the direction is sum_i vectors[i] times their
            weighted trimmed mean, element by element: this share of the weights is cut at both ends, and 0.5 gives the
            mean of lower and upper median. No weight may then be negative. Weights are votes: they do not scale values,
            so min(1, clip / norm) does not clip. `next` reads untrimmed vectors.
        noise: at least 0, with `Needs(noise=True)`: the standard deviation of the noise in the direction.
        next_noise: (R,), with `next` and `Needs(noise=True)`: the coefficients of the same z in the new rule vectors,
            for noise that is correlated over rounds (Dvijotham et al. 2024). States, checkpoints, stores and
            `Server.rule_vectors` then hold the noise of released params: they are as secret as the key. None: zeros.
        params: the weight of params in the direction: weight decay, -0.01 for a rule of updates, 0.01 for one of
            gradients. No limit of the server bounds it: if params grow by it beyond all numbers, the step that does
            so ends the server.
    """

    vectors: Float64
    rule_vectors: tuple[float, ...] = ()
    next: Float64 | None = None
    scalars: Scalars | None = None
    rejected: Mapping[int, str] = struct_field(default_factory=dict)
    cosines: Float64 | None = None
    skip: bool = False
    params: float = 0.0
    trim: float = 0.0
    noise: float = 0.0
    next_noise: Float64 | None = None


class Weigh(Protocol):
    """A weigh part: returns (M,) float64 weights, or Weights. Its attribute `needs`, if any, declares further needs."""

    def __call__(self, arrivals: Arrivals, /) -> Float64 | Weights:
        """Return the weights, in the order of the arrivals."""
        ...


@runtime_checkable
class OnArrival(Weigh, Protocol):
    """A weigh part whose weights are known on arrival except for a common factor, as accumulate=True needs them:
    w_i = factor * on_arrival_i, up to rounding.
    """

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """Return the raw weight of an arrival, computed only from facts about this arrival.

        `norm` is never NaN, because a streaming server copies every vector. A part with `Needs(facts=...)` gets a
        fourth argument: the arrival's facts, {name: value}. `num_examples` is a float if the arrival has the fact of
        this name.
        """
        ...

    def factor(self, arrivals: Arrivals, /) -> float:
        """Return the common factor of the raw weights of these arrivals."""
        ...


@register("calibrate", "calibrate")
@dataclass(frozen=True, slots=True)
class Calibrate:
    """The way in which per-client cached rows enter the direction. The engine does the arithmetic."""

    cached: bool  #: every client's last vector is kept as a row
    direction: Literal["difference", "mean"] = "difference"  #: h + sum_i w_i (u_i - h_i), or the new mean of all rows
    divide_by: Literal["all", "seen"] = "all"  #: the mean is over all N clients, or over those that have a row
    codec: Codec | None = None  #: how rows are stored; None: every bit is kept
    quantize_direction: bool = False  #: the difference uses the stored (encoded) row, not the pushed vector
    factor: float = 1.0  #: of h and h_i in the difference, from 0 to 1 (FedStale)

    def __post_init__(self) -> None:
        check_fields(self, flag, "cached", "quantize_direction")
        check_fields(self, optional(instance(Codec, "one of afflux.codecs")), "codec")
        check_fields(self, one_of("difference", "mean"), "direction")
        check_fields(self, one_of("all", "seen"), "divide_by")
        check_fields(self, one_or_less, "factor")
        if self.factor != 1.0 and (not self.cached or self.direction == "mean"):
            raise AffluxError("[Calibrate] factor is for differences of cached rows")
        if self.quantize_direction and (self.codec is None or self.codec.exact or self.direction == "mean"):
            raise AffluxError("[Calibrate] quantize_direction is for differences and codecs that round")


class Optimizer(Protocol):
    """A server optimizer. Its attribute `states`, if any, has the names of the vectors (d,) that it keeps, in the order
    of the engine's step, with their initial values.
    """

    def __call__(self, arrivals: Arrivals, /) -> ops.Step:
        """Return the step of this round."""
        ...


@register("rule", "rule")
@dataclass(frozen=True, slots=True)
class Rule:
    """An aggregation rule. `kind` is the kind of vector that clients push; it determines the sign of the direction.

    update    u_i = local - pulled params:    v = sum w_i u_i
    gradient  G_i = -u_i/(client_lr * steps): v = sum w_i G_i, and the step subtracts v
    model     y_i = local params:             v = sum w_i (y_i - params)
    """

    name: str
    kind: Kind
    buffer_size: int  #: M, arrivals per server step
    weigh: Weigh
    calibrate: Calibrate
    step: Optimizer

    def __post_init__(self) -> None:
        if as_text(self.name) is None:
            raise AffluxError(f"[Rule] name is {brief(self.name)}, must be a str")
        check_fields(self, one_of("update", "gradient", "model"), "kind")
        check_fields(self, count_of(1), "buffer_size")
        for role in ("weigh", "step"):
            part = getattr(self, role)
            if isinstance(part, type) or not callable(part):
                raise AffluxError(
                    f"[Rule] {role} is {brief(part)}, must be a part that can be called, such as Uniform()"
                )
        check_fields(self, instance(Calibrate, "a Calibrate"), "calibrate")
        self._check_needs()

    @reads("[Rule] what weigh or step needs")
    def _check_needs(self) -> None:
        needs = self.needs
        if self.kind == "model" and (self.calibrate.cached or needs.products or needs.rule_vectors):
            raise AffluxError("[Rule] rows, inner products and rule vectors are of updates or gradients, not of models")
        for name in ("trim", "noise", "participations"):
            if getattr(needs, name) and self.calibrate.cached:
                raise AffluxError(f"[Rule] weigh needs {name}, which does not go with cached rows")
        optional(integer(1, 2**31 - 1))("Rule", "needs.participations", needs.participations)
        optional(count_of(0))("Rule", "needs.max_staleness", needs.max_staleness)
        if needs.participations is not None and (needs.passes or not needs.once):
            raise AffluxError("[Rule] weigh needs participations, which goes with once=True and without passes")
        if len(needs.rule_vectors) > MOST_RULE_VECTORS or not set(needs.handed_in) <= set(needs.rule_vectors):
            raise AffluxError(
                f"[Rule] weigh needs the rule vectors {needs.rule_vectors} and is handed {needs.handed_in}: at most "
                f"{MOST_RULE_VECTORS}, and no others can be handed in"
            )
        names_of_facts("Rule", "needs.facts", needs.facts)
        for name, first in (*needs.scalars.items(), *self.states.items()):
            if not -inf < first < inf:
                raise AffluxError(f"[Rule] {name} starts at {first}, must be finite")
        names = self.rule_vectors
        if len(names) != len(needs.rule_vectors) + len(self.states):
            raise AffluxError(f"[Rule] weigh and step both keep a vector of one name: {', '.join(names)}")

    @property
    def needs(self) -> Needs:
        """The needs of the weigh part."""
        needs: Needs = getattr(self.weigh, "needs", _NOTHING)
        return needs

    @property
    def states(self) -> Mapping[str, float]:
        """The vectors that step keeps, and their initial values."""
        states: Mapping[str, float] = getattr(self.step, "states", {})
        return states

    @property
    def rule_vectors(self) -> dict[str, float]:
        """The vectors that a server keeps for this rule, those of weigh first, and their initial values."""
        return {**dict.fromkeys(self.needs.rule_vectors, 0.0), **self.states}

    def to_config(self) -> dict[str, Any]:
        """Return the rule as data for JSON, YAML and TOML, from which `afflux.rules.from_config` makes an equal rule.

        Returns:
            The fields by name. A part is {"part": its registered name, ...its fields}, a codec its name, None is
            "none" and inf "inf". A part that is not registered is only its class's name, {"own": name}, which
            `from_config` rejects.

        Raises:
            AffluxError: parts are nested more than 32 levels deep, or a part of your own has the text "none" or "inf"
                in a field that is not annotated `str`, or no text in a field that is.

        >>> from afflux.rules import fedbuff
        >>> fedbuff(buffer_size=2).to_config()["weigh"]["law"]
        {'part': 'polynomial', 'a': 0.5}
        """
        config: dict[str, Any] = to_plain(self)
        return config


def raw_weight(rule: Rule, staleness: int, num_examples: int, norm: float, facts: Facts) -> float:
    """Return the raw weight of an arrival, of a rule whose weigh part is an `OnArrival`."""
    weigh: Any = rule.weigh
    fact_arguments = (dict(facts),) if rule.needs.facts else ()
    examples = dict(facts).get(EXAMPLES, num_examples) if facts else num_examples
    weight: float = weigh.on_arrival(staleness, examples, norm, *fact_arguments)
    return weight


_NOTHING = Needs()
#: Checks that an argument is a rule.
a_rule = instance(Rule, "a Rule such as afflux.rules.fedbuff()")
