"""Engines that run outside of the job: they are asked what they are, adopted and updated, never started or ended."""
