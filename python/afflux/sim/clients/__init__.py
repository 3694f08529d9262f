"""The clients of a simulation: their schedule, the models that they pull, their training and their optimizers."""
