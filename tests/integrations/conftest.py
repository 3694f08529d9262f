"""Without flwr the tests here are skipped, and their helper cannot be imported."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["flower_grid.py"]
