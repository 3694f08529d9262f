"""The tasks that the papers' presets name: their data sets and models, and LoRA."""
