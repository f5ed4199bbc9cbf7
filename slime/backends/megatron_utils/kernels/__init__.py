"""Old import paths of kernels."""
