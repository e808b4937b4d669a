"""What tests share: worlds of ranks, parameters and gradients, references, others' jobs."""
