"""Discrete-event simulation of asynchronous federated learning; needs `afflux[sim]`."""
