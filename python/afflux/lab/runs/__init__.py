"""Simulated runs: one, several over one stream of updates, resumed, in parallel."""
