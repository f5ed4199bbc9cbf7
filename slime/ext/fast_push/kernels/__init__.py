"""Batched weight operations: one kernel launch runs a whole list of small copies, casts, quantizations or digests.

A push handles tens of thousands of matrices, most of them small; one launch for each would take longer than the work.
Here each list is built once, as a table on the device, and every push runs it again:

    tables       the three kinds of tables, their rows, and a reference implementation in torch
    triton_*     the kernels

The same classes use plain torch for CPU tensors and for cases that no kernel covers; both give the same bytes.  Triton
is imported only for CUDA tensors.
"""
