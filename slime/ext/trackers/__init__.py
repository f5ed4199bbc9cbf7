"""Trackers of experiments that a run's metrics go to, beside Weights & Biases and TensorBoard: trackio and MLflow."""
