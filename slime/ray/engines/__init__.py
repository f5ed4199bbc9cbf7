"""The engines of a run: one lifecycle table, the groups that act on it, and the fleet that the manager owns."""
