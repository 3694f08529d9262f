"""FedAdam, FedYogi and FedAdagrad."""

from adaptive import ADAM, adaptive

ADAPTIVE = {"fedadam": adaptive("adam"), "fedyogi": adaptive("yogi"), "fedadagrad": adaptive("adagrad", beta1=0.0)}
ROUNDS = {name: one_round for name, (one_round, _) in ADAPTIVE.items()}
BOUNDS = {name: bounds for name, (_, bounds) in ADAPTIVE.items()}
VECTORS = dict.fromkeys(ADAPTIVE, ADAM)
VARIANTS = {
    "fedadam-initial": ("fedadam", {"initial_v": 1e-6, "beta1": 0.5, "epsilon": 0.1}),
    "fedyogi-initial": ("fedyogi", {"initial_v": 0.25, "beta2": 0.9}),
    "fedadagrad-initial": ("fedadagrad", {"initial_v": 1e-6, "beta1": 0.9}),
}
