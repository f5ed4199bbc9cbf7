"""Evaluation on several data sets, each with its own grader and its own way of sampling."""
