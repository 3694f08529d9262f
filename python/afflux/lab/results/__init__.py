"""The results of runs: evaluations, audit log, kept updates, tables and figures."""
