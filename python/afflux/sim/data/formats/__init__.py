"""Readers of the file formats in which the data sets are published; files are data, nothing in them is executed."""
