"""Settings of the papers' experiments as data, a module for each paper (docs/background/papers.md)."""
