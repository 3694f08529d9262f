"""The commands of the laboratory: `afflux demo`, `compare` and `run`, by typer."""
