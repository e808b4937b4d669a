"""A study of optimizers over batch sizes."""
