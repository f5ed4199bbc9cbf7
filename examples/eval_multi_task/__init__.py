"""Evaluation on several data sets, each with its own grader and sampling parameters."""
