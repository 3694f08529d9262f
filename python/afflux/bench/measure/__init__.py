"""Timing, and what a machine can do: its facts, probes of its memory, the limit of a row."""
