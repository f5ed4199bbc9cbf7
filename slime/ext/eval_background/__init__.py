"""Evaluation beside training."""
