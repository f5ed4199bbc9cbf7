"""The maths of post-training: tensors in, tensors out.

Imports torch and ``slime.utils.errors`` only.  Where a number must be summed over ranks, the process group is passed
in; nothing here knows about parallel state, flags or batches.
"""
