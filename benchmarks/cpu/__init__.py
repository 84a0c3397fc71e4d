"""CPU benchmark: this package beside plain Paddle, Paddle's own kernels, PyTorch, and copies."""
