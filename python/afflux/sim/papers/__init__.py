"""The papers' presets, tasks and data sets; grids of settings."""
