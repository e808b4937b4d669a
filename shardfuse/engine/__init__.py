"""What a step is made of: shards and their states, kernels, reductions, and the driver."""
