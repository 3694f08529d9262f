"""FedAMS."""

from adaptive import AMSGRAD, adaptive

one_round, bounds = adaptive("amsgrad", epsilon=1e-8)
ROUNDS, BOUNDS, VECTORS = {"fedams": one_round}, {"fedams": bounds}, {"fedams": AMSGRAD}
VARIANTS = {"fedams-initial": ("fedams", {"initial_v": 1e-3})}
