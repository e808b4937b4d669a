"""The parts of a step: parameters, states, gathers, kernels, reductions, and the driver."""
