"""The description of a run: rows, contenders, inputs, streams of memory, columns of tables."""
