"""What clients do: their schedule, the models that they pull, their training and their optimizers."""
