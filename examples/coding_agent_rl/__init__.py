"""Coding agents in sandboxes, graded by the tests of their task."""
