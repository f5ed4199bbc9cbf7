"""Questions that require a tool or a judge, for the tiny model of examples/tiny_arithmetic."""
