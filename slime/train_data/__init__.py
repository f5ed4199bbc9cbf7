"""Turns finished samples into packed micro-batches.  Pure data transformations: no args, no processes.

convert (samples -> columns) -> schedule (assigns samples to steps, ranks and micro-batches) -> split (columns -> one
rank's data) -> microbatch (one rank's data -> packed tokens).
"""
