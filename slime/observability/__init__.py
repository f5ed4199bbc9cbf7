"""Logs, metrics, timers and traces.  Nothing here affects training numerics."""
