"""FedStale: cached updates that count by a factor, between FedAvg and CA2FL.

@article{rodio2024fedstale,
  title = {{FedStale}: leveraging Stale Client Updates in Federated Learning},
  author = {Rodio, Angelo and Neglia, Giovanni},
  journal = {arXiv preprint arXiv:2405.04171},
  year = {2024}
}
"""

from afflux.ops import codecs
from afflux.ops.codecs import Codec
from afflux.rules.calibration import cached_difference
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Uniform


def fedstale(
    *,
    buffer_size: int = 10,
    server_lr: Rate = 1.0,
    beta: float = 0.5,
    codec: Codec | codecs.Name | None = None,
) -> Rule:
    """Update the model from every M updates, calibrated by beta times each client's last one: if some take part rarely.

    v = beta h + 1/|S| * sum_{i in S} (u_i - beta h_i), x += server_lr * v, then h_i = u_i. h is the mean of all N
    clients' cached rows, which start at 0. beta = 1 is CA2FL (and FedVARP), beta = 0 is FedBuff with equal weights. The
    authors weigh clients by their numbers of examples and by how likely each takes part; this is their formula if both
    are equal. State on the server: 4 d bytes per client that has pushed, or the bytes of the codec, and 8 d for the
    float64 sum. Sweeps: one.
    """
    rows = cached_difference(codec, factor=beta)
    return Rule("fedstale", "update", buffer_size, Uniform(), rows, Sgd(server_lr))
