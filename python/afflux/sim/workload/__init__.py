"""The workload of a simulation: data, partition, models, running times, random numbers, settings and rules."""
