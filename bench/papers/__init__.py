"""Tables and figures of papers: `python -m bench.papers list | run | check` in a checkout. See docs/background/papers.md."""
