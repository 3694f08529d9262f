"""Timing, facts about the machine, probes of its memory, and the limit of a row."""
