"""The cached rows of clients: their interface, rows in memory, and rows that are staged to a GPU."""
