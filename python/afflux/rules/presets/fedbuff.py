"""FedBuff: a step for every M arrivals, weighted by their staleness.

@inproceedings{nguyen2022fedbuff,
  title = {Federated Learning with Buffered Asynchronous Aggregation},
  author = {Nguyen, John and Malik, Kshitiz and Zhan, Hongyuan and Yousefpour, Ashkan and Rabbat, Mike and Malek,
    Mani and Huba, Dzmitry},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  series = {PMLR},
  pages = {3581--3607},
  year = {2022}
}
"""

from dataclasses import replace

from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_text, brief
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.presets.dialects import DIALECTS, Dialect, DialectName
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.staleness import StalenessLaw
from afflux.rules.weights import Normalise, Staleness


def fedbuff(
    *,
    buffer_size: int = 10,
    server_lr: Rate = 1.0,
    staleness: StalenessLaw | None = None,
    normalise: Normalise = "count",
    dialect: DialectName | Dialect = "paper",
) -> Rule:
    """Update the model from every M updates; the staler an update, the smaller its weight.

    x += server_lr / M * sum_i s(staleness_i) u_i (Algorithm 1), s(t) = (1 + t)^-1/2 by default (section 5).

    `normalise="weights"` divides by sum s instead of M. `staleness=Constant()` gives all updates equal weights: the
    Async FL baseline of CA2FL and FADAS. `staleness=None` selects the dialect's own function; it does not switch
    staleness weights off. State on the server: only params and the buffer. Sweeps: one.

    `dialect` names a framework whose FedBuff is computed instead, or is one of `afflux.rules.presets.dialects` with its
    options, such as `appfl(num_clients=100)`. A dialect has its own staleness function; `staleness` replaces it if the
    framework lets users choose. The dialect also determines the rule's kind: in appfl, fedscale and plato clients push
    models, because these use the difference from the current params, and not from the params that the client pulled.
    """
    if isinstance(dialect, Dialect):
        variant = dialect
    elif (name := as_text(dialect)) in DIALECTS:
        variant = DIALECTS[name]()
    else:
        raise AffluxError(f"[fedbuff] dialect is {brief(dialect)}, must be one of {', '.join(DIALECTS)}")
    if staleness is not None and variant.law_is_fixed:
        raise AffluxError(
            f"[fedbuff] staleness is {brief(staleness)}, but this dialect has no law other than {variant.law}"
        )
    law = variant.law if staleness is None else staleness
    rule = Rule("fedbuff", variant.kind, buffer_size, Staleness(law, normalise), NONE, Sgd(server_lr))
    if variant.part is None:
        return rule
    if as_text(normalise) != "count":
        raise AffluxError(f"[fedbuff] normalise is {brief(normalise)}, but only the paper's dialect leaves the choice")
    return replace(rule, weigh=variant.part(law, buffer_size))
