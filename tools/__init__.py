"""Command-line tools: one job each."""
