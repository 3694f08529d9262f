"""The papers' data sets, read from a folder of the user; nothing is downloaded (docs/data.md)."""
