"""From finished samples to packed micro-batches: pure data shapes, no args, no processes.

convert (samples -> columns) -> schedule (which rank trains what, in which micro-batch) -> split (columns -> one
rank's data) -> microbatch (one rank's data -> packed tokens).
"""
