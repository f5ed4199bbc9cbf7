"""Trackers of experiments that a run's metrics go to: Weights & Biases, TensorBoard, trackio and MLflow."""
