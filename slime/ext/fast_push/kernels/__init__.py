"""Whole lists of small operations on weights, each list in one launch of a GPU kernel.

A push handles tens of thousands of matrices, most of them small; a launch for each would take longer than the work.
Here the list is made once, as a table on the device, and every later push runs it again:

    tables       the three kinds of tables, what a row of one says, and the work on it in torch
    triton_*     the kernels

On CPU tensors, and wherever Triton does not cover a case, the same classes work in plain torch; both ways give the
same bytes.  Triton is imported only for CUDA tensors.
"""
