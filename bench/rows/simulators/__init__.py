"""Simulators of federated learning on the same workload: afflux's, FLGo's and pfl-research's."""

from bench.rows.simulators.row import simulator_row
from bench.rows.simulators.workload import cnn, logistic

SIMULATORS = [simulator_row("logistic", logistic, 7_850, 400), simulator_row("cnn", cnn, 61_706, 60)]
