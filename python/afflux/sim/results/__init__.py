"""What a run leaves behind: evaluations, audit log, kept updates, tables and figures."""
