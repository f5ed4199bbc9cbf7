"""Jobs that survive the death of their processes, and drivers that restart after a failure."""
