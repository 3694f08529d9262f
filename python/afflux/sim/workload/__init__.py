"""What is simulated: data, its partition, models, running times, random numbers, settings and rules."""
