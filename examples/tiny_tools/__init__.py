"""Questions that need a tool or a second opinion, for the tiny model of examples/tiny_arithmetic."""
