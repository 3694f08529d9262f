"""Rows that time `Server`: pushes, streaming, stores on disk."""
