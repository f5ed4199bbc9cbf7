"""GPU kernels on weights."""
