"""Settings of the papers' experiments as data, a module for each paper (docs/reference/presets.md)."""
