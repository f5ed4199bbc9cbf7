"""The torch profiler over a window of rollouts, and snapshots of the trainer's memory."""
