"""CA2FL: each client's last update is cached, at full precision or in 8 to 1 bits.

Numbers of sections and equations are those of the workshop version, FL-ICML 2023.

@inproceedings{wang2024ca2fl,
  title = {Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update Calibration},
  author = {Wang, Yujia and Cao, Yuanpu and Wu, Jingcheng and Chen, Ruoyu and Chen, Jinghui},
  booktitle = {International Conference on Learning Representations},
  year = {2024}
}

@inproceedings{wang2023ca2fl,
  title = {Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update Calibration},
  author = {Wang, Yujia and Cao, Yuanpu and Wu, Jingcheng and Chen, Ruoyu and Chen, Jinghui},
  booktitle = {Federated Learning and Analytics in Practice: Algorithms, Systems, Applications, and Opportunities,
    workshop at ICML},
  year = {2023}
}
"""

from afflux.ops import codecs
from afflux.ops.codecs import Codec
from afflux.ops.validation import one_of
from afflux.rules.calibration import cached_difference
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Uniform

#: Section 6: M and the global learning rate of the main experiments (N = 100 clients, 20 at once).
BUFFER_SIZE, SERVER_LR = 10, 1.0


def ca2fl(
    *, buffer_size: int = BUFFER_SIZE, server_lr: Rate = SERVER_LR, codec: Codec | codecs.Name | None = None
) -> Rule:
    """Update the model from every M updates, calibrated by each client's last one: for clients whose data differ.

    v = h + 1/|S| * sum_{i in S} (u_i - h_i), x += server_lr * v, then h_i = u_i (Algorithm 1). h is the mean of all N
    clients' cached rows, which start at 0. State on the server: 4 d bytes per client that has pushed, or the bytes of
    the codec, and 8 d for the float64 sum. Sweeps: one.
    """
    return Rule("ca2fl", "update", buffer_size, Uniform(), cached_difference(codec), Sgd(server_lr))


def mf_ca2fl(
    *,
    bits: int = 8,
    codec: codecs.Family = "affine",
    quantize_direction: bool = False,
    buffer_size: int = BUFFER_SIZE,
    server_lr: Rate = SERVER_LR,
) -> Rule:
    """Update the model as CA2FL does, and store clients' last updates in 8, 4, 2 or 1 bits an element.

    h_i = Q(u_i) (section 5). v uses the full u_i and the decoded rows; with `quantize_direction` it uses Q(u_i), as in
    equation G.2. The paper does not name Q. Probably Q has one scale for the whole vector ("affine-vector"). One scale
    for each 128 elements ("affine") has a smaller error, and "rotated" the smallest for 4, 2 and 1 bits:
    docs/reference/codecs.md. State on the server: slightly more than d bits/8 bytes per client that has pushed, and 8 d
    for the float64 sum. Sweeps: one.
    """
    one_of(*codecs.FAMILIES)("mf_ca2fl", "codec", codec)
    rows = cached_difference(codecs.of_family(codec, bits), quantize_direction=quantize_direction)
    return Rule("mf_ca2fl", "update", buffer_size, Uniform(), rows, Sgd(server_lr))
