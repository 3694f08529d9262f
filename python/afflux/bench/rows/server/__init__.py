"""Rows that go through `Server`: pushes, streaming, stores on disk."""
