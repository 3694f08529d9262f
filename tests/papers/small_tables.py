"""A table with two cells whose runs take a fraction of a second."""

from bench.papers.paper_tables import Cell, Reading, Table

SETTINGS = {"model": "logreg", "num_clients": 8, "concurrency": 3, "arrivals": 12, "eval_every": 6, "local_steps": 1}
CELLS = (
    Cell("first", "fedbuff:buffer_size=3:server_lr=0.5", SETTINGS, 0.5),
    Cell("second", "fedasync:alpha=0.5", SETTINGS, 0.25),
)
SMALL = Table(
    "small", "Ours", "a table", "digits", 0.0, CELLS, 2, others=(Reading("first one", lambda rows: rows[0].accuracy),)
)
