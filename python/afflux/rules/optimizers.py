"""Server optimizers, the step of a rule. `lr` is a number or a schedule of afflux.rules.schedules; v is the direction.

The adaptive ones (FedOpt, Reddi et al. 2021, Algorithm 2; FedAMS, Wang et al. 2022; FADAS, Wang et al. 2024):

    m = beta1 m + (1 - beta1) v,    params += lr m / (sqrt(V) + epsilon)

with `bias_correction` (the code of FADAS's authors), t' = version + 1:

    params += lr / (1 - beta1^t') m / (sqrt(V) / sqrt(1 - beta2^t') + epsilon)

Each optimizer keeps vectors (d,) of the type of params. The sweep of the round updates them. `REACH` has the bound of
each kind of `ops.Step` that a server makes rounds with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from afflux import ops
from afflux.ops import exact
from afflux.ops.errors import AffluxError
from afflux.ops.validation import check_fields, flag, less_than_one, not_negative, positive
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals
from afflux.rules.schedules import Rate, a_rate, rate


class Reach(NamedTuple):
    """How far the steps of a kind go if no element of any direction has a magnitude above d.

    `params` (step, d) is the largest change of an element of params in one step, divided by |lr|; `states` (step, d,
    steps) the largest magnitude of an element of a state after so many steps, which began at 0.
    """

    params: Callable[[ops.Step, float], float]
    states: Callable[[ops.Step, float, float], float] = lambda step, d, steps: 0.0


_ADAPTIVE = Reach(lambda step, d: d / step.epsilon, lambda step, d, steps: max(d, d * d))
#: By `ops.Step.kind`. A server refuses a kind that has no entry: it could not say whether a round would overflow.
REACH: Mapping[str, Reach] = MappingProxyType(
    {
        "sgd": Reach(lambda step, d: d),
        "assign": Reach(lambda step, d: d),
        "momentum": Reach(lambda step, d: d / (1 - step.beta1), lambda step, d, steps: d / (1 - step.beta1)),
        "nesterov": Reach(
            lambda step, d: d + step.beta1 * d / (1 - step.beta1), lambda step, d, steps: d / (1 - step.beta1)
        ),
        "adam": _ADAPTIVE,
        "amsgrad": _ADAPTIVE,
        "yogi": Reach(_ADAPTIVE.params, lambda step, d, steps: max(d, (2 - step.beta2) * d * d)),  # v passes d^2
        "adagrad": Reach(_ADAPTIVE.params, lambda step, d, steps: max(d, d * d * steps)),
    }
)


@register("sgd", "step")
@dataclass(frozen=True, slots=True)
class Sgd:
    """params += lr v. Keeps nothing."""

    lr: Rate = 1.0
    states: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __post_init__(self) -> None:
        check_fields(self, a_rate, "lr")

    def __call__(self, arrivals: Arrivals, /) -> ops.Step:
        """See the class."""
        return ops.Step("sgd", rate(self.lr, arrivals))


@register("momentum", "step")
@dataclass(frozen=True, slots=True)
class Momentum:
    """velocity = beta velocity + v, params += lr (1 - dampening) velocity. Keeps one vector, which begins at 0.

    With `nesterov`: velocity = beta velocity + (1 - dampening) v, params += lr (v + beta velocity). Without dampening
    both are those of torch.optim.SGD; with one, torch's first velocity is v itself. `nesterov` with dampening = beta is
    momentum look-ahead (Ajanthan et al. 2025), which torch refuses.
    """

    lr: Rate = 1.0
    beta: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    states: ClassVar[Mapping[str, float]] = MappingProxyType({"velocity": 0.0})

    def __post_init__(self) -> None:
        check_fields(self, a_rate, "lr")
        check_fields(self, less_than_one, "beta", "dampening")
        check_fields(self, flag, "nesterov")

    def __call__(self, arrivals: Arrivals, /) -> ops.Step:
        """See the class."""
        lr = rate(self.lr, arrivals)
        if self.nesterov:
            return ops.Step("nesterov", lr, self.beta, self.dampening)
        return ops.Step("momentum", lr * (1.0 - self.dampening), self.beta)


@register("adam", "step")
@dataclass(frozen=True, slots=True)
class Adam:
    """v = beta2 v + (1 - beta2) direction^2, V = v. Keeps m and v, which begin at 0 and `initial_v`."""

    lr: Rate = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    initial_v: float = 0.0
    bias_correction: bool = False
    kind: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        check_fields(self, a_rate, "lr")
        check_fields(self, less_than_one, "beta1", "beta2")
        check_fields(self, positive, "epsilon")
        check_fields(self, not_negative, "initial_v")
        check_fields(self, flag, "bias_correction")

    @property
    def states(self) -> Mapping[str, float]:
        """First and second moment."""
        return {"m": 0.0, "v": self.initial_v}

    def __call__(self, arrivals: Arrivals, /) -> ops.Step:
        """See the module."""
        lr, root_scale = rate(self.lr, arrivals), 1.0
        if self.bias_correction:
            steps = arrivals.version + 1.0
            lr = lr / (1.0 - exact.pow(self.beta1, steps))
            root_scale = 1.0 / sqrt(1.0 - exact.pow(self.beta2, steps))
        return ops.Step(self.kind, lr, self.beta1, self.beta2, self.epsilon, root_scale)


@register("amsgrad", "step")
class AmsGrad(Adam):
    """As Adam, and v_hat = max(v_hat, v), V = v_hat (FedAMS, FADAS). Keeps m, v and v_hat."""

    __slots__ = ()
    kind = "amsgrad"

    @property
    def states(self) -> Mapping[str, float]:
        """First and second moment, and the largest second moment so far."""
        return {"m": 0.0, "v": self.initial_v, "v_hat": self.initial_v}


@register("yogi", "step")
class Yogi(Adam):
    """v = v - (1 - beta2) direction^2 sign(v - direction^2), V = v. Keeps m and v."""

    __slots__ = ()
    kind = "yogi"


@register("adagrad", "step")
class Adagrad(Adam):
    """v = v + direction^2, V = v. beta2 has no meaning, and there is no bias to correct. Keeps m and v."""

    __slots__ = ()
    kind = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction:
            raise AffluxError("[Adagrad] bias_correction is True, must be False: v is no mean, beta2 has no meaning")
