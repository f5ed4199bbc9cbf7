"""MIS: importance weights and rejection for the mismatch between engine and trainer probabilities."""
