"""What a run is described with: rows, contenders, inputs, streams of memory, columns of tables."""
