"""The papers' models in torch. `build_model` makes a model from its name and a seed (docs/data.md)."""
