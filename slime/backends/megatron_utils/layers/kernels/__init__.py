"""Triton kernels for CUDA.  Each has its plain torch counterpart beside the module that launches it."""
