"""The benchmark: `python -m bench` in a checkout. See bench/README.md."""
