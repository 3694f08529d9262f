"""The papers' data sets, read from a folder of the user's; nothing is ever downloaded (docs/data.md)."""
