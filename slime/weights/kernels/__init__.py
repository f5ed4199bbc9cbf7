"""Whole lists of small operations on weights, each list in one launch of a GPU kernel.

A push handles tens of thousands of matrices, most of them small; a launch for each would take longer than the work.
Here the list is made once, as a table on the device, and every later push runs it again:

    cast_table    live parameters -> a flat bucket: copied, cast or quantized
    copy_table    a flat bucket -> an engine's parameters, and the comparison of both
    digest_table  64-bit digests of segments of a bucket

On CPU tensors, and wherever Triton does not cover a case, the same classes work in plain torch; both ways give the
same bytes.  Triton is imported only for CUDA tensors.
"""
