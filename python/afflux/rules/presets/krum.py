"""Krum and Multi-Krum: updates that are close to many others, against a minority of hostile clients.

@inproceedings{blanchard2017krum,
  title = {Machine Learning with Adversaries: {Byzantine} Tolerant Gradient Descent},
  author = {Blanchard, Peva and El Mhamdi, El Mahdi and Guerraoui, Rachid and Stainer, Julien},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {30},
  year = {2017}
}
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from afflux.ops.errors import AffluxError
from afflux.ops.exact import ordered_sum
from afflux.ops.validation import check_fields, count_of
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Needs, Rule, Weights
from afflux.rules.schedules import Rate


@register("krum", "weigh")
@dataclass(frozen=True, slots=True)
class Krum:
    """The mean of the `keep` arrivals with the smallest scores (Blanchard et al. 2017, section 4; m = `keep`).

    The score of an arrival is the sum of its M - f - 2 (at least one) smallest squared distances to others, with f =
    `byzantine`; of equal scores the first in canonical order counts as smaller. Each client is in a buffer once. With
    f > 0 a buffer of fewer than 2 f + 3 arrivals, after a flush, makes no step. Distances come from inner products:
    they have an error of about 2^-53 times the squared norms.
    """

    byzantine: int
    keep: int = 1
    needs: ClassVar[Needs] = Needs(gram=True, once=True)

    def __post_init__(self) -> None:
        check_fields(self, count_of(0), "byzantine")
        check_fields(self, count_of(1), "keep")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        count, gram = len(arrivals), arrivals.gram
        near, weights = max(count - self.byzantine - 2, 1), np.zeros(count)
        if self.byzantine and count < 2 * self.byzantine + 3:
            why = f"{count} arrivals, fewer than {2 * self.byzantine + 3}"
            return Weights(weights, rejected=dict.fromkeys(range(count), why), skip=True)
        products, scores = gram.tolist(), []
        for i in range(count):
            squares = [products[i][i] + products[j][j] - 2.0 * products[i][j] for j in range(count) if j != i]
            scores.append(ordered_sum(sorted([max(square, 0.0) for square in squares])[:near]))
        closest = sorted(range(count), key=scores.__getitem__)[: min(self.keep, near)]
        weights[closest] = 1.0 / len(closest)
        return Weights(weights, rejected={i: f"score {scores[i]:.3g}" for i in range(count) if i not in closest})


def krum(*, buffer_size: int = 10, byzantine: int | None = None, server_lr: Rate = 1.0) -> Rule:
    """Step by the update that is closest to most others: for at most `byzantine` hostile clients in a buffer.

    x += server_lr * u_k, where k has the smallest sum of squared distances to its M - f - 2 nearest arrivals, f =
    `byzantine` (section 4), by default the most that M allows: 2 f + 3 <= M. The authors' code was not seen. State on
    the server: only params and the buffer. Sweeps: two, all inner products and the step.
    """
    return _krum("krum", buffer_size, byzantine, 1, server_lr)


def multi_krum(
    *, buffer_size: int = 10, byzantine: int | None = None, keep: int | None = None, server_lr: Rate = 1.0
) -> Rule:
    """Average the `keep` updates that are closest to most others: for at most `byzantine` hostile clients in a buffer.

    x += server_lr * the mean of the updates with the smallest scores, see `krum` (section 4, m = `keep`). `keep` is at
    most M - f - 2, its default. The authors' code was not seen. State on the server: only params and the buffer.
    Sweeps: two, all inner products and the step.
    """
    return _krum("multi_krum", buffer_size, byzantine, keep, server_lr)


def _krum(name: str, buffer_size: int, byzantine: int | None, keep: int | None, server_lr: Rate) -> Rule:
    size = count_of(1)(name, "buffer_size", buffer_size)
    hostile = max((size - 3) // 2, 0) if byzantine is None else count_of(0)(name, "byzantine", byzantine)
    most = max(size - hostile - 2, 1)
    mean_size = most if keep is None else count_of(1)(name, "keep", keep)
    if hostile and size < 2 * hostile + 3:
        raise AffluxError(f"[{name}] buffer_size is {size}, must be at least 2 byzantine + 3, {2 * hostile + 3}")
    if mean_size > most:
        raise AffluxError(f"[{name}] keep is {mean_size}, must be at most buffer_size - byzantine - 2, {most}")
    return Rule(name, "update", size, Krum(hostile, mean_size), NONE, Sgd(server_lr))
