"""Tables and figures of papers: `python -m bench.papers list | run | check`; see docs/background/papers.md."""
