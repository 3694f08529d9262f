"""The papers' models, in torch; `build_model` makes one by name from a seed (docs/data.md)."""
