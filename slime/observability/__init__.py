"""Logs, metrics, timers and traces.  Nothing here can change a number that trains."""
