"""One loss per file: a packed micro-batch to a reduced loss and reduced metrics.

Every loss is called as ``f(args, batch, logits, sum_of_sample_mean)``.  The formulas are in ``slime.algorithms``; here
a batch is turned into their arguments.  ``loss.py`` beside this package holds the table and scales the result.
"""
