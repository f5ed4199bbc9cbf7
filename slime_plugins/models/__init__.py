"""Models that the trainer loads by path (--spec), not by import."""
