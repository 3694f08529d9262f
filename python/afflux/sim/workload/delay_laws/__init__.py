"""Laws of the clients' running times with options, one idea a file; `workload.delay_names` finds them by name."""
