"""Laws of the clients' running times with options, one law in each file; `workload.delay_names` has their names."""
