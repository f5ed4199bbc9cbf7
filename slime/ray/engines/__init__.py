"""The engines of a run: one table of life, the groups that act on it, and the fleet that the manager owns."""
