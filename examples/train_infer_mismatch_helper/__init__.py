"""MIS: weights and rejection for tokens that the engine sampled from other probabilities than the trainer's."""
